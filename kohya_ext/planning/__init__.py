"""What to change so that a run fits its GPU."""
