"""Step single weights with the Triton kernels of Adafactor, where they support the weight and the optimizer's options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kohya_ext.kernels import fused

LEAST = 2**16
"""Elements of a weight from which on its bytes take longer than its launches, of which there are as many."""


@functools.cache
def kernels_on(device: str, dtype: torch.dtype) -> Any:
    """Return the module of Triton kernels; None where they do not run."""

    def tried() -> Any:
        from kohya_ext.kernels import adafactor_kernels

        random = functools.partial(torch.zeros_like, dtype=torch.int32) if dtype is torch.bfloat16 else None
        for shape in ((2, 2), (1, 1, 2, 2)):
            weight, statistic = torch.zeros(shape, device=device, dtype=dtype), torch.zeros(shape[:-1], device=device)
            tensors = weight, weight, statistic, statistic.clone()
            adafactor_kernels.step(*tensors, beta=0.0, eps=1.0, clip=1.0, rate=0.0, decay=0.0, random=random)
        return adafactor_kernels

    return fused.usable(device, tried, "Adafactor's steps")


def random_bits(weight: Any) -> Any:
    """Return the random bits with which sd-scripts rounds a bf16 weight: int32 of 16 bits, of its shape."""
    return torch.randint_like(weight, 0, 1 << 16, dtype=torch.int32)


def step(optimizer: Any, weight: Any, group: Mapping[str, Any], random: Callable[[Any], Any] | None, lower: Any = None) -> bool:
    """Step a weight of transformers' Adafactor with its gradient and state, as the optimizer does; False if unsupported.

    ``random`` returns the bits of :func:`random_bits`, with which bf16 weights are rounded; None: they are rounded to nearest.
    ``lower``: the lower halves of a master weight.
    Source: ``library/adafactor_fused.py`` of sd-scripts, and ``transformers.optimization.Adafactor``.
    """
    gradient = weight.grad
    is_plain = group["beta1"] is None and not group["relative_step"] and not group["scale_parameter"]
    if not is_plain or gradient is None or not gradient.is_contiguous() or weight.numel() < LEAST:
        return False
    kernels = kernels_on(weight.device.type, weight.dtype)
    if kernels is None or not kernels.supports(weight):
        return False
    state = optimizer.state[weight]
    shapes = {"exp_avg_sq_row": weight.shape[:-1], "exp_avg_sq_col": (*weight.shape[:-2], weight.shape[-1])}
    if "step" not in state:
        state["step"] = 0
        state.update((name, torch.zeros(shape, device=weight.device)) for name, shape in shapes.items())
    state["step"] += 1
    for name in shapes:  # a loaded state may have the weights' type
        state[name] = state[name].to(weight.device, torch.float32)
    state["RMS"] = kernels.step(
        weight.detach(),
        gradient,
        *(state[name] for name in shapes),
        beta=1.0 - state["step"] ** group["decay_rate"],
        eps=group["eps"][0],
        clip=group["clip_threshold"],
        rate=group["lr"],
        decay=group["weight_decay"] * group["lr"],
        random=random if weight.dtype is torch.bfloat16 else None,
        lower=lower,
    )
    return True
