"""Unify the inputs of a class's blocks, so that they share graphs.

- Dynamo compiles the first image size as a static graph, and treats sizes as dynamic from the second one on. If the dataset
  has several sizes, the dimensions that depend on them are marked dynamic before the first graph is traced.
- The inputs of a model's first block do not require a gradient and those of the others do, which would need two graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kohya_ext.patching.types import DataSet


@dataclass(frozen=True)
class Inputs:
    """The parameters of a method that vary between calls or between blocks, by name."""

    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tensors, or tuples and lists of tensors -> the dimensions that depend on the image size."""
    activations: tuple[str, ...] = ()
    """Parameters that require grad in every block of a model except the first."""


def named_arguments(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> value of a call's arguments. ``names`` are the parameters in order, without ``self``."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def mark_sizes(inputs: Inputs, arguments: Mapping[str, Any]) -> None:
    """Mark the dimensions that vary as dynamic. This is a hint: dynamo still specializes a dimension that must be static.

    Call it for every call or for none, because newer versions guard on the mark.
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
        for item in value:
            yield from _tensors(item)


def require_gradients(inputs: Inputs, block: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activations that do not require a gradient, by name, as tensors that require one.

    Empty if the block has no trained weights, because its backward would then be wasted. The additional gradient is
    discarded; the gradients of the weights do not change.
    """
    import torch

    lacking = {
        name: value
        for name in inputs.activations
        if isinstance(value := arguments.get(name), torch.Tensor) and not value.requires_grad and value.is_floating_point()
    }
    if not lacking or not _is_trained(block):
        return {}
    # Contiguous, as the outputs of blocks are. Dynamo guards on strides, and a slice of a longer text is not contiguous.
    requiring = torch.zeros((), device="cpu", requires_grad=True)
    return {name: _without_gradient().apply(value.contiguous(), requiring) for name, value in lacking.items()}


@functools.cache
def _without_gradient() -> Any:
    """Return an operation on two tensors that returns the first, and discards its gradient.

    A leaf would keep itself and its gradient as long as the loss exists, which the scripts keep until the next step's.
    """
    import torch

    class WithoutGradient(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, value: Any, requiring: Any) -> Any:
            return value.view_as(value)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return None, None

    return WithoutGradient


def _is_trained(block: Any) -> bool:
    """Return whether a block has trained weights, of its own or in a LoRA module that replaces a layer's forward."""
    owners = (getattr(part.__dict__.get("forward"), "__self__", None) for part in block.modules())
    return any(
        weight.requires_grad for module in (block, *owners) if hasattr(module, "parameters") for weight in module.parameters()
    )


def has_several_sizes(data_sets: Sequence[DataSet]) -> bool:
    """Return whether the images of sd-scripts' datasets are in buckets of more than one size."""
    sizes = {
        size
        for data_set in data_sets
        for size, bucket in zip(data_set.bucket_manager.resos, data_set.bucket_manager.buckets, strict=True)
        if bucket
    }
    return len(sizes) > 1
