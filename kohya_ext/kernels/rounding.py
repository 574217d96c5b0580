"""Stochastic rounding to bf16 within a Triton kernel, and what it drops of master weights.

Sources: see :mod:`kohya_ext.optimizers.stochastic_rounding` and :mod:`kohya_ext.optimizers.master_weights`.
"""

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


@triton.jit
def joined(weight, lower):
    """Return float32 values of bf16 weights, which are read as float32, and their lower halves, int16."""
    low = lower.to(tl.int32)
    upper = weight.to(tl.int32, bitcast=True) - ((low & 1) << 16)
    return (upper | (low & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def split(values, random):
    """Return float32 values rounded to those that bf16 has, with 16 random bits each, and their lower halves. NaN stays NaN."""
    bits = values.to(tl.int32, bitcast=True)
    upper = (bits + random.to(tl.int32)) & -65536
    lower = ((bits & -2) | ((upper >> 16) - (bits >> 16))).to(tl.int16)
    return tl.where(values == values, upper.to(tl.float32, bitcast=True), values), lower
