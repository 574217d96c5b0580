"""Sizes of saved states and of tensors in memory."""

from __future__ import annotations

from typing import Any

from kohya_ext.patching.training_loop import trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.run.loaded_parts import gradients_without_optimizer

#: Overhead of torch.save and safetensors, bytes per tensor. Measured for a LoRA's state: 170.
_ENTRY = 200


def state_bytes(accelerator: Accelerator) -> int:
    """Return the approximate size of a state, bytes: trained weights, optimizer state, and gradients that nothing clears."""
    optimizers = accelerator._optimizers
    slots = [slot for optimizer in optimizers for slot in optimizer.state_dict()["state"].values()]
    tensors = [*trained_weights(optimizers), *(value for slot in slots if isinstance(slot, dict) for value in slot.values())]
    tensors += gradients_without_optimizer(accelerator).values()
    return tensor_bytes(tensors) + _ENTRY * len(tensors)


def tensor_bytes(obj: Any) -> int:
    """Return the size of all tensors in nested dictionaries, lists and tuples, bytes. Shared storage counts once."""
    sizes: dict[int, int] = {}
    stack = [obj]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif hasattr(item, "untyped_storage"):
            sizes[item.untyped_storage().data_ptr()] = item.numel() * item.element_size()
    return sum(sizes.values())
