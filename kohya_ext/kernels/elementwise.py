"""Triton kernels of GEGLU, SwiGLU and rotary embeddings: one pass, where torch's operators take two to four.

Values are computed in fp32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _geglu(halves, out, width, TILE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    value = tl.load(halves + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(halves + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    result = value * gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * width + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _geglu_backward(gradient, halves, out, width, TILE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    value = tl.load(halves + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(halves + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))  # of the gate that passes
    slope = share + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    tl.store(out + row * 2 * width + columns, (grad * gate * share).to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * 2 * width + width + columns, (grad * value * slope).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate, value, out, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    given = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    result = given * tl.sigmoid(given) * tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gradient, gate, value, grad_gate, grad_value, size, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    given = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(value + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(given)
    slope = share * (1.0 + given * (1.0 - share))
    tl.store(grad_gate + at, (grad * factor * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_value + at, (grad * given * share).to(grad_value.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x, table, out, heads, size, x_image, x_head, x_token, out_image, out_head, out_token, table_image,
    SIGN: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row, pairs = tl.program_id(0).to(tl.int64), tl.program_id(1) * (TILE // 2) + tl.arange(0, TILE // 2)
    x += row // heads * x_image + row % heads * x_head
    out += row // heads * out_image + row % heads * out_head
    table += row // heads * table_image
    elements = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, token, column = elements < size, elements // WIDTH, elements % WIDTH
    cosine, sine = tl.split(tl.reshape(tl.load(table + elements, mask=inside, other=0.0), (TILE // 2, 2)))
    sine *= SIGN
    if HALVES:
        pair_inside, pair_token, half = 2 * pairs < size, 2 * pairs // WIDTH, pairs % (WIDTH // 2)
        at = x + pair_token * x_token + half
        first = tl.load(at, mask=pair_inside, other=0.0).to(tl.float32)
        second = tl.load(at + WIDTH // 2, mask=pair_inside, other=0.0).to(tl.float32)
        to = out + pair_token * out_token + half
        tl.store(to, (first * cosine - second * sine).to(out.dtype.element_ty), mask=pair_inside)
        tl.store(to + WIDTH // 2, (first * sine + second * cosine).to(out.dtype.element_ty), mask=pair_inside)
    else:
        value = tl.load(x + token * x_token + column, mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(value, (TILE // 2, 2)))
        result = tl.interleave(first * cosine - second * sine, first * sine + second * cosine)
        tl.store(out + token * out_token + column, result.to(out.dtype.element_ty), mask=inside)


def geglu(halves: Any) -> Any:
    """Return ``value * gelu(gate)`` [..., d] of ``halves`` [..., 2 d], contiguous, whose halves are value and gate."""
    width = halves.shape[-1] // 2
    out = halves.new_empty((*halves.shape[:-1], width))
    _geglu[(out.numel() // width, triton.cdiv(width, _TILE))](halves, out, width, TILE=_TILE, num_warps=4)
    return out


def geglu_backward(gradient: Any, halves: Any) -> Any:
    """Return the gradient of ``halves`` [..., 2 d] for that of the result [..., d], both contiguous."""
    width = halves.shape[-1] // 2
    out = torch.empty_like(halves)
    grid = (gradient.numel() // width, triton.cdiv(width, _TILE))
    _geglu_backward[grid](gradient, halves, out, width, TILE=_TILE, num_warps=4)
    return out


def swiglu(gate: Any, value: Any) -> Any:
    """Return ``silu(gate) * value``, both contiguous and of one shape."""
    out = torch.empty_like(gate)
    _swiglu[(triton.cdiv(out.numel(), _TILE),)](gate, value, out, out.numel(), TILE=_TILE, num_warps=4)
    return out


def swiglu_backward(gradient: Any, gate: Any, value: Any) -> tuple[Any, Any]:
    """Return the gradients of ``gate`` and ``value`` for that of the result, all contiguous and of one shape."""
    grads, size = (torch.empty_like(gate), torch.empty_like(value)), gate.numel()
    _swiglu_backward[(triton.cdiv(size, _TILE),)](gradient, gate, value, *grads, size, TILE=_TILE, num_warps=4)
    return grads


def rotates(x: Any, rotations: Any) -> bool:
    """Return whether :func:`rotate` supports shapes and strides."""
    if x.dim() != 4 or x.shape[-1] % 2 or x.stride(-1) != 1:
        return False
    if rotations.dtype is not torch.complex64 or not rotations.is_contiguous():
        return False
    return rotations.shape in ((images, 1, x.shape[2], x.shape[3] // 2) for images in (1, x.shape[0]))


def rotate(x: Any, rotations: Any, inverse: bool, halves: bool = False) -> Any:
    """Return ``x`` [b, heads, tokens, d] with pairs of elements rotated, or rotated back, in the order of ``x`` in memory.

    A pair are adjacent elements, or with ``halves`` those at one place in both halves of d. ``rotations`` are complex64
    [b or 1, 1, tokens, d / 2], contiguous.
    """
    images, heads, tokens, width = x.shape
    size, table = tokens * width, torch.view_as_real(rotations)
    out = torch.empty_like(x)
    numbers = (*x.stride()[:3], *out.stride()[:3], size if len(rotations) > 1 else 0)
    options = {"SIGN": -1 if inverse else 1, "WIDTH": width, "HALVES": halves, "TILE": _TILE, "num_warps": 4}
    _rotate[(images * heads, triton.cdiv(size, _TILE))](x, table, out, heads, size, *numbers, **options)
    return out
