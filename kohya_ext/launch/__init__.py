"""Start a run: from the startup file, through the launcher or accelerate, and again after an out-of-memory error."""
