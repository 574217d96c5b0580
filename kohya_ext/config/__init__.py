"""The options of a run, their values, and the origin of each value."""
