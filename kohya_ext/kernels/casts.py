"""Copies of many small weights in another precision, and their gradients, by one kernel each instead of one per weight.

Autocast copies each fp32 weight of a LoRA whenever its layer runs, and each gradient back: in an SDXL step that is a quarter of
all kernels, most of which take less time than their launch. This module needs torch but not sd-scripts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.function import once_differentiable

#: Each copy begins at a multiple of as many elements in the common tensor, so that kernels can load whole vectors.
_ALIGNMENT = 64

_apart = False
"""Whether :func:`together` replaces nothing."""


class _Copies(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        copies = _copied(weights, dtype)
        is_trained = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(copy for copy, is_one in zip(copies, is_trained, strict=True) if not is_one))
        return tuple(copies)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        given = [gradient for gradient in gradients if gradient is not None]
        copies = iter(_copied(given, ctx.dtype) if given else ())
        return (None, *(None if gradient is None else next(copies) for gradient in gradients))


def _copied(tensors: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    common = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
    copies = [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(common.split(sizes), tensors, strict=True)]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def copies(weights: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return copies in ``dtype`` of weights, which have one dtype and device. The copies' gradients become the weights'.

    Values and gradients are those of ``weight.to(dtype)``, bit for bit. Copies share a tensor's memory, and so do gradients.
    """
    return tuple(_Copies.apply(dtype, *weights))


@contextmanager
def together(layers: Sequence[Any]) -> Iterator[int]:
    """Replace the weights of layers by copies in autocast's dtype inside the block, if autocast would copy all of them.

    Yields the number of copies.
    """
    weights = [layer._parameters["weight"] for layer in layers]
    device = weights[0].device.type if weights else "cpu"
    if _apart or not weights or not torch.is_autocast_enabled(device) or not all(map(_is_copied, weights)):
        yield 0
        return
    for layer, copy in zip(layers, copies(weights, torch.get_autocast_dtype(device)), strict=True):
        layer._parameters["weight"] = copy
    try:
        yield len(weights)
    finally:
        for layer, weight in zip(layers, weights, strict=True):
            layer._parameters["weight"] = weight


@contextmanager
def apart() -> Iterator[None]:
    """Leave layers their own weights inside the block, where a layer of a pass without gradients may run again with them."""
    global _apart
    before, _apart = _apart, True
    try:
        yield
    finally:
        _apart = before


def _is_copied(weight: Any) -> bool:
    # DeepSpeed's ZeRO-3 gathers the weight of a layer when the layer is called.
    return weight.dtype is torch.float32 and not hasattr(weight, "ds_id")
