"""Measurements behind the published figures: one module a figure, whose JSON is in results/.

``results/README.md`` names the command and the content of each file. Variants run in processes of their own that take turns, so
memory peaks do not mix and a slow phase of the machine slows every variant.
"""
