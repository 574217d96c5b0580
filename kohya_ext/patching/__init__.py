"""What a patch author imports: the patch itself, the training loop's callbacks, and helpers for blocks and LoRA modules."""
