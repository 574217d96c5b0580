"""Quantize rows to 8 bits and multiply them, with torch's own operations. The Triton kernels are tested against this."""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: The largest value of each 8-bit format; int8 is used symmetrically.
LARGEST: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

#: The formats whose rows are rotated. A floating-point format resolves small values next to outliers without a rotation.
ROTATED = frozenset({torch.int8})

#: The addend of a product [m, n]: the product of a LoRA's hidden rows [m, rank] and its second matrix [rank, n].
LoRA = tuple[torch.Tensor, torch.Tensor]

#: The smallest divisor for scales, so that a row of zeros has a finite inverse.
TINY = 1e-30


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fp32 ``rows`` [m, k] in 8 bits and the scale of each row [m], fp32: ``rows`` is about 8-bit times scale."""
    peak = rows.abs().amax(-1).clamp_min(TINY)  # NaN stays NaN
    scaled = rows * (LARGEST[dtype] / peak)[:, None]
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), peak / LARGEST[dtype]


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of 8-bit ``a`` [m, k] and ``b`` [n, k] as fp32 [m, n]: ``a b^T``, for int8 from exact integers."""
    if a.dtype is torch.int8:
        return torch._int_mm(a, b.t()).float()
    return a.float() @ b.float().t()
