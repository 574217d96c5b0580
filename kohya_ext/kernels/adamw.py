"""Step single bf16 weights with AdamW's Triton kernel, where it supports the weight and the optimizer's options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kohya_ext.kernels import fused

_STATES = ("exp_avg", "exp_avg_sq")

_OTHER_FORMS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
"""Options with which a step computes something else, or counts on the GPU."""


@functools.cache
def kernels_on(device: str) -> Any:
    """Return the module of Triton kernels; None where they do not run."""

    def tried() -> Any:
        from kohya_ext.kernels import adamw_kernels

        weight, gradient, *states = (torch.zeros(16, device=device, dtype=torch.bfloat16) for _ in range(4))
        seed = torch.zeros(1, device=device, dtype=torch.int64)
        adamw_kernels.step(
            weight, gradient, states[0], states[1], seed, number=1, betas=(0.9, 0.999), eps=1.0, rate=0.0, decay=0.0
        )
        return adamw_kernels

    return fused.usable(device, tried, "AdamW's steps")


def step(optimizer: Any, weight: Any, group: Mapping[str, Any], seed: Callable[[], Any], lower: Any = None) -> bool:
    """Step a bf16 weight of torch's AdamW that has bf16 states, with its gradient; False if it is unsupported.

    The weight and its states are rounded stochastically, with random bits of ``seed()``: int64 on the GPU, one element.
    ``lower``: the lower halves of a master weight.
    """
    state = optimizer.state.get(weight, {})
    tensors = [weight.detach(), weight.grad, *map(state.get, _STATES)]
    count = state.get("step")
    if any(group.get(name) for name in _OTHER_FORMS) or count is None or count.device.type != "cpu":
        return False
    if not all(_is_supported(tensor) and tensor.shape == weight.shape for tensor in tensors):
        return False
    kernels = kernels_on(weight.device.type)
    if kernels is None:
        return False
    rate = float(group["lr"])
    options = {"number": count.item() + 1, "betas": group["betas"], "eps": group["eps"]}
    kernels.step(*tensors, seed(), **options, rate=rate, decay=rate * group["weight_decay"], lower=lower)
    count += 1
    return True


def _is_supported(tensor: Any) -> bool:
    return tensor is not None and tensor.dtype is torch.bfloat16 and bool(tensor.is_contiguous()) and tensor.numel() > 0
