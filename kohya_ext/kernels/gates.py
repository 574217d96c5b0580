"""Triton kernels of GEGLU: one pass forward and one backward, where torch's operators take two and four.

Values are computed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _forward(halves, out, width, TILE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    value = tl.load(halves + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(halves + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    result = value * gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gradient, halves, out, width, TILE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    value = tl.load(halves + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(halves + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))  # of the gate that passes
    slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    tl.store(out + row * 2 * width + columns, (grad * gate * share).to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * width + width + columns, (grad * value * slope).to(out.dtype.element_ty), mask=inside)


def forward(halves: Any) -> Any:
    """Return ``value * gelu(gate)`` [..., d] of ``halves`` [..., 2 d], contiguous, whose halves are value and gate."""
    width = halves.shape[-1] // 2
    out = halves.new_empty((*halves.shape[:-1], width))
    _forward[(out.numel() // width, triton.cdiv(width, _TILE))](halves, out, width, TILE=_TILE, num_warps=4)
    return out


def backward(gradient: Any, halves: Any) -> Any:
    """Return the gradient of ``halves`` [..., 2 d] for that of the result [..., d], both contiguous."""
    width = halves.shape[-1] // 2
    out = torch.empty_like(halves)
    _backward[(gradient.numel() // width, triton.cdiv(width, _TILE))](gradient, halves, out, width, TILE=_TILE, num_warps=4)
    return out
