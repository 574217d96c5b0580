"""Measurements behind every published figure: variants alternate with upstream in one run and give a ratio with its spread.

- ``python -m benchmarks.run SUITE`` measures and writes JSON to results/;
- ``python -m benchmarks.report`` writes the tables of that JSON;
- ``python -m benchmarks.vram_accuracy`` compares estimates with real allocations on a CPU;
- ``python -m benchmarks.full_size`` compares them with PyTorch's CUDA allocator: every tier, at full size, on a virtual GPU.

Each variant runs in its own process, and the processes take turns: A B C A B C. Memory peaks do not mix, and
a slow phase of the machine slows every variant.
"""
