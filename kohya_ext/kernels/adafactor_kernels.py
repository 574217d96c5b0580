"""Adafactor's step in two or three Triton kernels, which read each weight twice and its gradient two or three times.

PyTorch's operators of the same step move 132 bytes for each bf16 weight, and create four float32 tensors of its shape.
Values are computed in fp32, in the order of upstream's ``library/adafactor_fused.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from kohya_ext.kernels.rounding import joined, rounded, split

#: Rows and columns of a tile of a matrix.
_TILE = {"TILE_M": 32, "TILE_N": 128, "num_warps": 8}

#: The same for the update, which keeps more values in registers: on sm_80 a larger tile spills them.
_UPDATED = {**_TILE, "TILE_M": 16}

#: Small matrices of a tile, and the most rows or columns of one.
_TOGETHER = {"TILE": 128, "num_warps": 8}
SIDE = 4


@triton.jit
def _tile(m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    return rows, columns, inside, rows[:, None].to(tl.int64) * n + columns[None, :]


@triton.jit
def _adafactor_squares(gradient, weight, of_rows, of_columns, of_weights, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Add up the squares of a tile's gradient by rows and by columns, and those of its weights."""
    rows, columns, inside, at = _tile(m, n, TILE_M, TILE_N)
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    square = grad * grad
    tl.store(of_rows + tl.program_id(1).to(tl.int64) * m + rows, tl.sum(square, 1), mask=rows < m)
    tl.store(of_columns + tl.program_id(0).to(tl.int64) * n + columns, tl.sum(square, 0), mask=columns < n)
    tl.store(of_weights + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(value * value))


@triton.jit
def _adafactor_squares_of_update(gradient, row_factors, column_factors, out, m, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Add up the squares of a tile of the update."""
    rows, columns, inside, at = _tile(m, n, TILE_M, TILE_N)
    row_factor = tl.load(row_factors + rows, mask=rows < m, other=0.0)[:, None]
    column_factor = tl.load(column_factors + columns, mask=columns < n, other=0.0)[None, :]
    update = row_factor * column_factor * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(update * update))


@triton.jit
def _stepped(
    weight, lower, update, divisor, random, at, inside, rate, decay,
    HAS_DECAY: tl.constexpr, IS_ROUNDED: tl.constexpr, IS_MASTER: tl.constexpr,
):  # fmt: skip
    """Return weights after an update, if they are rounded, as bf16 in float32; keep the lower halves of master weights."""
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if IS_MASTER:
        value = joined(value, tl.load(lower + at, mask=inside, other=0))
    if HAS_DECAY:
        value -= decay * value
    value -= tl.math.div_rn(update, tl.load(divisor)) * rate
    if IS_MASTER:
        value, bits = split(value, tl.load(random + at, mask=inside, other=0))
        tl.store(lower + at, bits, mask=inside)
    elif IS_ROUNDED:
        value = rounded(value, tl.load(random + at, mask=inside, other=0))
    return value


@triton.jit
def _adafactor_update(
    weight, lower, gradient, row_factors, column_factors, divisor, random, out, m, n, rate, decay,
    HAS_DECAY: tl.constexpr, IS_ROUNDED: tl.constexpr, IS_MASTER: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Step a tile of the weights."""
    rows, columns, inside, at = _tile(m, n, TILE_M, TILE_N)
    row_factor = tl.load(row_factors + rows, mask=rows < m, other=0.0)[:, None]
    column_factor = tl.load(column_factors + columns, mask=columns < n, other=0.0)[None, :]
    update = row_factor * column_factor * tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    value = _stepped(weight, lower, update, divisor, random, at, inside, rate, decay, HAS_DECAY, IS_ROUNDED, IS_MASTER)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _small_tile(count, M: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr):
    matrices, side = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE), tl.arange(0, SIDE)
    inside_rows = (matrices < count)[:, None] & (side < M)[None, :]
    inside_columns = (matrices < count)[:, None] & (side < N)[None, :]
    at_rows, at_columns = matrices[:, None] * M + side[None, :], matrices[:, None] * N + side[None, :]
    inside = inside_rows[:, :, None] & inside_columns[:, None, :]
    at = at_rows[:, :, None] * N + side[None, None, :]
    return inside, at, inside_rows, at_rows, inside_columns, at_columns


@triton.jit
def _small_update(grad, row, column, inside_rows, inside_columns, M: tl.constexpr):
    """Return the update of small matrices for their gradient and statistics."""
    row_factor = tl.where(inside_rows, tl.rsqrt(row / (tl.sum(row, 1) / M)[:, None]), 0.0)
    column_factor = tl.where(inside_columns, tl.rsqrt(column), 0.0)
    return row_factor[:, :, None] * column_factor[:, None, :] * grad


@triton.jit
def _adafactor_small_squares(
    gradient, weight, rows, columns, of_updates, of_weights, count, beta, eps,
    M: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Step the statistics of small matrices, and add up the squares of their update and of their weights."""
    inside, at, inside_rows, at_rows, inside_columns, at_columns = _small_tile(count, M, N, SIDE, TILE)
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.where(inside, grad * grad + eps, 0.0)
    row = tl.load(rows + at_rows, mask=inside_rows, other=0.0) * beta + tl.sum(square, 2) / N * (1 - beta)
    column = tl.load(columns + at_columns, mask=inside_columns, other=0.0) * beta + tl.sum(square, 1) / M * (1 - beta)
    tl.store(rows + at_rows, row, mask=inside_rows)
    tl.store(columns + at_columns, column, mask=inside_columns)
    update = _small_update(grad, row, column, inside_rows, inside_columns, M)
    tl.store(of_updates + tl.program_id(0), tl.sum(update * update))
    tl.store(of_weights + tl.program_id(0), tl.sum(value * value))


@triton.jit
def _adafactor_update_small(
    weight, lower, gradient, rows, columns, divisor, random, out, count, rate, decay,
    HAS_DECAY: tl.constexpr, IS_ROUNDED: tl.constexpr, IS_MASTER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Step the weights of small matrices."""
    inside, at, inside_rows, at_rows, inside_columns, at_columns = _small_tile(count, M, N, SIDE, TILE)
    row = tl.load(rows + at_rows, mask=inside_rows, other=0.0)
    column = tl.load(columns + at_columns, mask=inside_columns, other=0.0)
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    update = _small_update(grad, row, column, inside_rows, inside_columns, M)
    value = _stepped(weight, lower, update, divisor, random, at, inside, rate, decay, HAS_DECAY, IS_ROUNDED, IS_MASTER)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def supports(weight: Any) -> bool:
    """Return whether :func:`step` steps weights of a shape: matrices, and convolutions of at most four by four."""
    is_small = weight.dim() == 4 and max(weight.shape[2:]) <= SIDE
    return bool(weight.is_contiguous()) and (weight.dim() == 2 or is_small)


def _grid(weight: Any) -> tuple[int, ...]:
    m, n = weight.shape[-2:]
    if weight.dim() > 2:
        return (triton.cdiv(weight.numel() // (m * n), _TOGETHER["TILE"]),)
    return triton.cdiv(m, _TILE["TILE_M"]), triton.cdiv(n, _TILE["TILE_N"])


def step(
    weight: Any,
    gradient: Any,
    rows: Any,
    columns: Any,
    *,
    beta: float,
    eps: float,
    clip: float,
    rate: float,
    decay: float,
    random: Callable[[Any], Any] | None,
    lower: Any = None,
) -> Any:
    """Step weights [..., m, n] with statistics ``rows`` [..., m] and ``columns`` [..., n]. Return the RMS they had.

    ``weight`` and ``gradient`` are contiguous, on one GPU; the statistics are fp32. ``beta`` is the share that these keep,
    ``eps`` is added to squared gradients, an update's RMS is at most ``clip``, ``rate`` is the learning rate, and ``decay`` the
    share of themselves that weights lose. ``random`` returns int32 of 16 random bits, [..., m, n], by which bf16 weights are
    rounded stochastically; without it weights are rounded to nearest. ``lower``: the lower halves of master weights, int16.
    Source: N. Shazeer and M. Stern, Adafactor, https://arxiv.org/abs/1804.04235, algorithm 4.
    """
    (m, n), size = weight.shape[-2:], weight.numel()
    count, is_small, grid = size // (m * n), weight.dim() > 2, _grid(weight)
    small = {"M": m, "N": n, "SIDE": SIDE, **_TOGETHER}
    if is_small:
        of_updates, of_weights = rows.new_empty(grid), rows.new_empty(grid)
        _adafactor_small_squares[grid](gradient, weight, rows, columns, of_updates, of_weights, count, beta, eps, **small)
        factors = rows, columns
    else:
        of_rows, of_columns, of_weights = (rows.new_empty(shape) for shape in ((grid[1], m), (grid[0], n), grid))
        _adafactor_squares[grid](gradient, weight, of_rows, of_columns, of_weights, m, n, **_TILE)
        for statistic, sums, summed in ((rows, of_rows, n), (columns, of_columns, m)):
            statistic.mul_(beta).add_(sums.sum(0).div_(summed).add_(eps), alpha=1 - beta)
        factors, of_updates = ((rows / rows.mean()).rsqrt_(), columns.rsqrt()), rows.new_empty(grid)
        _adafactor_squares_of_update[grid](gradient, *factors, of_updates, m, n, **_TILE)
    divisor = of_updates.sum().div_(size).sqrt_().div_(clip).clamp_(min=1.0)
    tensors = weight, lower, gradient, *factors, divisor, None if random is None else random(weight), weight
    options = {"HAS_DECAY": decay != 0, "IS_ROUNDED": random is not None, "IS_MASTER": lower is not None}
    if is_small:
        _adafactor_update_small[grid](*tensors, count, rate, decay, **options, **small)
    else:
        updated = triton.cdiv(m, _UPDATED["TILE_M"]), grid[1]
        _adafactor_update[updated](*tensors, m, n, rate, decay, **options, **_UPDATED)
    return of_weights.sum().div_(size).sqrt_()
