"""How every published figure is made: a variant beside upstream, in the same run, alternating, as a ratio with its spread.

- ``python -m benchmarks.run SUITE`` measures and writes JSON to results/;
- ``python -m benchmarks.report`` makes tables and pictures of that JSON;
- ``python -m benchmarks.bundle`` packs all of it for a machine without a network.

Every variant lives in a process of its own, which stays alive while the rounds go around: A B C A B C. So memory peaks do
not mix, and whatever slows the machine down for a while slows all of them.
"""
