"""Stochastic rounding to bf16 within a Triton kernel. Source: see :mod:`kohya_ext.optimizers.stochastic_rounding`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(value, random):
    """Return float32 values that bf16 has for others, with 16 random bits each. NaN stays NaN.

    bf16 is the upper half of a float32, to whose lower half the random bits are added. A NaN of a GPU has all bits set, and
    would become a zero.
    """
    bits = (value.to(tl.int32, bitcast=True) + random.to(tl.int32)) & -65536
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
