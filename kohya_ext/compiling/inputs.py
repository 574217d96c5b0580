"""What decides how many graphs a class has, beside its own variants: the inputs of its blocks, which are made alike here.

- A picture of another size is a graph of its own, until dynamo has met a second size and takes it for dynamic. Where the
  data set is known to have several, the dimensions that follow it are said to be dynamic before the first graph is traced.
- What enters a model's first block requires no gradient, what enters the others does: a graph of its own, for one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Inputs:
    """The parameters of a method that differ from call to call or from block to block, by name."""

    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors, or tuples and lists of such -> their dimensions that follow the size of a picture."""
    activations: tuple[str, ...] = ()
    """Those that require grad in every block of a model but its first."""


def arguments_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value of a call's arguments; ``names``: the parameters, in order, without ``self``."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def mark_sizes(inputs: Inputs, arguments: Mapping[str, Any]) -> None:
    """Tell dynamo which dimensions will differ. It specializes one that turns out to be fixed: a hint costs no graph.

    To be done in every call or in none: newer versions guard on it.
    """
    from torch._dynamo import maybe_mark_dynamic

    for name, dimensions in inputs.sizes.items():
        for tensor in _tensors(arguments.get(name)):
            if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
                maybe_mark_dynamic(tensor, dimensions)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)


def with_gradients(inputs: Inputs, block: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those activations that lack a gradient, by name, as they are in the other blocks: requiring one.

    Empty where nothing of the block is trained, which would then be gone through backward for nothing. The gradient itself
    goes nowhere; the weights' are the same without it.
    """
    import torch

    lacking = {
        name: value
        for name in inputs.activations
        if isinstance(value := arguments.get(name), torch.Tensor) and not value.requires_grad and value.is_floating_point()
    }
    if not lacking or not _is_trained(block):
        return {}
    # Contiguous, as what blocks hand on: a text cut off from a longer one is not, and strides are guarded on.
    return {name: value.detach().contiguous().requires_grad_() for name, value in lacking.items()}


def _is_trained(block: Any) -> bool:
    """Whether a block has trained weights: its own, or of a network's module that has taken over a layer's forward."""
    owners = (getattr(part.__dict__.get("forward"), "__self__", None) for part in block.modules())
    return any(
        weight.requires_grad for module in (block, *owners) if hasattr(module, "parameters") for weight in module.parameters()
    )


def has_several_sizes(data_sets: Sequence[Any]) -> bool:
    """Whether the pictures of sd-scripts' data sets are in buckets of more than one size."""
    sizes = {
        size
        for data_set in data_sets
        for size, bucket in zip(data_set.bucket_manager.resos, data_set.bucket_manager.buckets, strict=True)
        if bucket
    }
    return len(sizes) > 1
