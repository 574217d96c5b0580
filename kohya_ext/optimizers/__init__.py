"""Steps of an optimizer for one weight at a time, and the rounding of what it computes."""
