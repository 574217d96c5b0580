"""Fused operations: one pass over an activation instead of several."""
