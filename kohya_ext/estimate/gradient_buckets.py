"""The buckets that DistributedDataParallel reduces gradients in.

Source: ``torch/csrc/distributed/c10d/reducer.cpp`` of https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kohya_ext.estimate.events import Kind
from kohya_ext.estimate.tracker import Tracker


def allocate(module: Any, tracker: Tracker) -> dict[Any, torch.Tensor]:
    """Log the buckets of a module, which accelerate wraps if any of its weights is trained; return each weight's place.

    They are as large as its gradients together.
    """
    places: dict[Any, torch.Tensor] = {}
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        alike = [weight for weight in weights if weight.dtype is dtype]
        bucket = torch.empty(sum(weight.numel() for weight in alike), dtype=dtype)
        tracker.mark([bucket], Kind.BUCKET)
        offset = 0
        for weight in alike:
            places[weight] = bucket.narrow(0, offset, weight.numel()).view(weight.shape)
            offset += weight.numel()
    return places


def use(places: Mapping[Any, torch.Tensor], as_view: bool) -> None:
    """Let gradients be in the buckets (``--ddp_gradient_as_bucket_view``), or copy each to its bucket and back."""
    for weight, place in places.items():
        weight.register_post_accumulate_grad_hook(_move_to(place) if as_view else _copy_to(place))


def _move_to(place: torch.Tensor) -> Any:
    def move(weight: Any) -> None:
        if weight.grad.untyped_storage() is not place.untyped_storage():
            weight.grad = place.copy_(weight.grad)

    return move


def _copy_to(place: torch.Tensor) -> Any:
    def copy(weight: Any) -> None:
        weight.grad.copy_(place.copy_(weight.grad))

    return copy
