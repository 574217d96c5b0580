"""Keep float32 weights as bf16 weights and the lower halves of their bits, so that a step loses no small update.

bf16 is the upper half of a float32. The model has each value rounded stochastically to bf16, anew in each step: so a change
that is smaller than the distance of two bf16 values reaches the model, on average, at once. The optimizer's state has the lower
half, of which the last bit tells whether the weight was rounded up. The values are those of float32 weights without their last
bit, for 2 bytes per weight instead of the 4 of a float32 copy. Kahan's sums in bf16 take 2 bytes, too, and keep 8 bits.

Sources: Split-SGD-BF16 of D. Kalamkar et al., https://arxiv.org/abs/2005.04680. Kahan's sums for bf16 weights: P. Zamirai et
al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

from typing import Any

LOWER = "lower_bits"
"""The name of the lower halves in an optimizer's state of a weight: int16, of the weight's shape."""

_BITS = 16
"""Bits of a float32 that bf16 does not have."""

_KEPT = (1 << _BITS) - 2
"""Mask of those of them that are kept."""


def joined(weight: Any, lower: Any) -> Any:
    """Return the float32 values, a new tensor, of a bf16 weight and its lower halves."""
    import torch

    bits = weight.view(torch.int16).to(torch.int32).sub_(lower & 1).bitwise_left_shift_(_BITS)
    return bits.bitwise_or_(lower.to(torch.int32).bitwise_and_(_KEPT)).view(torch.float32)


def split(values: Any, weight: Any, lower: Any, random: Any) -> None:
    """Write float32 values to a bf16 weight, rounded stochastically, and to its lower halves. NaN stays NaN.

    ``random``: 16 random bits of each value, int32.
    """
    import torch

    bits = (values.view(torch.int32) + (random & 1)).bitwise_and_(-2)
    is_up = (bits & _KEPT).add_(random & _KEPT).bitwise_right_shift_(_BITS)
    weight.view(torch.int16).copy_((bits >> _BITS).add_(is_up))
    weight.masked_fill_(values.isnan(), float("nan"))  # to whose bits nothing can be added on a GPU, where all are set
    lower.copy_(bits.bitwise_or_(is_up).bitwise_left_shift_(_BITS).bitwise_right_shift_(_BITS))
