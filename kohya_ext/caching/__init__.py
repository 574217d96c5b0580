"""Caches of latents and text encoder outputs: work around the GPU's in threads, and the index of checked files."""
