"""The options of a run: what the user asked for, and where each value came from."""
