"""Keep float32 weights as bf16 weights and the lower halves of their bits, so that rounding adds no noise to what is trained.

bf16 is the upper half of a float32. The model has each value rounded stochastically to bf16, by other random bits in each step:
so a change that is smaller than the distance of two bf16 values reaches the model on average, too. The optimizer's state has
the lower half, whose last bit tells whether the weight was rounded up. Together they are the float32 value but for that bit,
for 2 bytes per weight instead of the 4 of a float32 copy. Kahan's sums in bf16 take 2 bytes, too, and keep 8 bits.

Sources: Split-SGD-BF16 of D. Kalamkar et al., https://arxiv.org/abs/2005.04680. Kahan's sums for bf16 weights: P. Zamirai et
al., Revisiting BFloat16 Training, https://arxiv.org/abs/2010.06192.
"""

from __future__ import annotations

from typing import Any

LOWER = "lower_bits"
"""The name of the lower halves in an optimizer's state of a weight: int16, of the weight's shape."""


def joined(weight: Any, lower: Any) -> Any:
    """Return the float32 values, a new contiguous tensor, of a bf16 weight and its lower halves."""
    import torch

    values = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    kept, upper = _halves(values)
    kept.copy_(lower)
    torch.sub(weight.view(torch.int16), lower & 1, out=upper)
    return values


def split(values: Any, weight: Any, lower: Any, random: Any) -> None:
    """Write contiguous float32 values to a bf16 weight, rounded stochastically, and to its lower halves. NaN stays NaN.

    ``random``: 16 random bits of each value, int32, which are changed.
    """
    import torch

    kept, upper = _halves(values)
    random.add_(values.view(torch.int32))  # carries to the upper half where a value is rounded up
    bits = weight.view(torch.int16)
    bits.copy_(_halves(random)[1])
    torch.bitwise_and(kept, -2, out=lower).add_(bits - upper)
    weight.masked_fill_(values.isnan(), float("nan"))  # to whose bits nothing can be added on a GPU, where all are set


def _halves(values: Any) -> tuple[Any, Any]:
    """Return views of the lower and upper 16 bits of contiguous values of 32 bits: of all machines in this order."""
    import torch

    lower, upper = values.unsqueeze(-1).view(torch.int16).unbind(-1)
    return lower, upper
