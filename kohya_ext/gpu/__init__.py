"""GPU memory during a run: measure it, cap it, and react when it runs out."""
