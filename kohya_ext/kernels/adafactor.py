"""Adafactor's step of a matrix in three Triton kernels, which read each weight twice and its gradient three times.

PyTorch's operators of the same step move 126 bytes for each bf16 weight, and create four float32 tensors of its shape.
Values are computed in fp32, in the order of upstream's ``library/adafactor_fused.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Rows and columns of a tile.
_TILE = {"TILE_M": 64, "TILE_N": 128, "num_warps": 8}


@triton.jit
def _tile(m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    return rows, columns, inside, rows[:, None].to(tl.int64) * n + columns[None, :]


@triton.jit
def _squares(gradient, weight, of_rows, of_columns, of_weights, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Add up the squares of a tile's gradient by rows and by columns, and those of its weights."""
    rows, columns, inside, at = _tile(m, n, TILE_M, TILE_N)
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    square = grad * grad
    tl.store(of_rows + tl.program_id(1).to(tl.int64) * m + rows, tl.sum(square, 1), mask=rows < m)
    tl.store(of_columns + tl.program_id(0).to(tl.int64) * n + columns, tl.sum(square, 0), mask=columns < n)
    tl.store(of_weights + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(value * value))


@triton.jit
def _squares_of_update(gradient, row_factors, column_factors, out, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Add up the squares of a tile of the update."""
    rows, columns, inside, at = _tile(m, n, TILE_M, TILE_N)
    row_factor = tl.load(row_factors + rows, mask=rows < m, other=0.0)[:, None]
    column_factor = tl.load(column_factors + columns, mask=columns < n, other=0.0)[None, :]
    update = row_factor * column_factor * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(update * update))


@triton.jit
def _update(
    weight, gradient, row_factors, column_factors, divisor, random, out, m, n, rate, decay,
    HAS_DECAY: tl.constexpr, IS_ROUNDED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Step a tile of the weights."""
    rows, columns, inside, at = _tile(m, n, TILE_M, TILE_N)
    row_factor = tl.load(row_factors + rows, mask=rows < m, other=0.0)[:, None]
    column_factor = tl.load(column_factors + columns, mask=columns < n, other=0.0)[None, :]
    update = row_factor * column_factor * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DECAY:
        value -= decay * value
    value -= tl.math.div_rn(update, tl.load(divisor)) * rate
    if IS_ROUNDED:  # bf16 is the upper half of a float32, to whose lower half the random bits are added
        bits = value.to(tl.int32, bitcast=True) + tl.load(random + at, mask=inside, other=0)
        value = (bits & -65536).to(tl.float32, bitcast=True)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def step(
    weight: Any, gradient: Any, rows: Any, columns: Any, *, beta: float, eps: float, clip: float, rate: float, decay: float
) -> Any:
    """Step a matrix [m, n] and its statistics ``rows`` [m] and ``columns`` [n] in fp32, and return the weights' RMS before.

    ``weight`` and ``gradient`` are contiguous, on one GPU. ``beta`` is the share of the statistics that remains, ``eps`` is added
    to squared gradients, an update's RMS is at most ``clip``, ``rate`` is the learning rate and ``decay`` the weights' share that
    they lose. bf16 weights are rounded stochastically, with upstream's random bits.
    Source: N. Shazeer and M. Stern, Adafactor, https://arxiv.org/abs/1804.04235, algorithm 4.
    """
    (m, n), size = weight.shape, weight.numel()
    grid = triton.cdiv(m, _TILE["TILE_M"]), triton.cdiv(n, _TILE["TILE_N"])
    of_rows, of_columns, of_tiles = (rows.new_empty(shape) for shape in ((grid[1], m), (grid[0], n), grid))
    _squares[grid](gradient, weight, of_rows, of_columns, of_tiles, m, n, **_TILE)
    for statistic, sums, count in ((rows, of_rows, n), (columns, of_columns, m)):
        statistic.mul_(beta).add_(sums.sum(0).div_(count).add_(eps), alpha=1 - beta)
    rms = of_tiles.sum().div_(size).sqrt_()
    factors = (rows / rows.mean()).rsqrt_(), columns.rsqrt()
    _squares_of_update[grid](gradient, *factors, of_tiles, m, n, **_TILE)
    divisor = of_tiles.sum().div_(size).sqrt_().div_(clip).clamp_(min=1.0)
    is_rounded = weight.dtype is torch.bfloat16
    random = torch.randint_like(weight, 0, 1 << 16, dtype=torch.int32) if is_rounded else None
    _update[grid](
        weight, gradient, *factors, divisor, random, weight, m, n, rate, decay, HAS_DECAY=decay != 0, IS_ROUNDED=is_rounded, **_TILE
    )
    return rms
