"""Start a run: from the startup file, through the launcher or accelerate, and again after an out-of-memory error.

``demo_training`` is what the demo starts where sd-scripts is missing.
"""
