"""The API for patches: the patch itself, the training loop's callbacks, and helpers for blocks and LoRA modules."""
