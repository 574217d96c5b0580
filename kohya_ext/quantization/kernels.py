"""Triton kernels: rotate and quantize rows in one pass; 8-bit products with scales, bias, rotation and LoRA in their epilogue.

Configurations are fixed, because autotuning would delay the first step of each image size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kohya_ext.quantization.arithmetic import LARGEST, ROTATED, TINY, LoRA
from kohya_ext.quantization.rotation import BLOCK


@triton.jit
def _hadamard(SIZE: tl.constexpr, ELEMENT: tl.constexpr, dtype: tl.constexpr):
    """Return a Hadamard matrix of ``ELEMENT``: one is negative if its indices have an odd number of common bits."""
    index = tl.arange(0, SIZE)
    common = index[:, None] & index[None, :]
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = common ^ (common >> 1)
    return ((1 - 2 * (common & 1)).to(tl.float32) * ELEMENT).to(dtype)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quantize_rows(
    x, factors, out, scales, width, stride,
    ROTATED: tl.constexpr, HAS_FACTORS: tl.constexpr, DTYPE: tl.constexpr, MATRIX: tl.constexpr,
    LARGEST: tl.constexpr, TINY: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize one row: rotated, or multiplied by the ``factors`` of its columns, or as it is."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCKS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = columns < width
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(DTYPE)
    if ROTATED:
        values = tl.dot(values.to(MATRIX), _hadamard(SIZE, 1 / 8, MATRIX), input_precision="ieee")
    else:
        values = values.to(tl.float32)
    if HAS_FACTORS:
        values *= tl.load(factors + columns, mask=inside, other=0.0)
    peak = tl.reduce(tl.reduce(tl.abs(values), 1, _larger), 0, _larger)
    peak = tl.maximum(peak, TINY, propagate_nan=tl.PropagateNan.ALL)
    values = values * tl.math.div_rn(LARGEST, peak)
    if out.dtype.element_ty == tl.int8:
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        quantized = ((values + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)
    else:
        quantized = values.to(out.dtype.element_ty)
    tl.store(out + row * width + columns, quantized, mask=inside)
    tl.store(scales + row, tl.math.div_rn(peak, LARGEST))


@triton.jit
def _transpose(x, out, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside)
    tl.store(out + column[:, None].to(tl.int64) * rows + row[None, :], tile.trans(), mask=inside.trans())


@triton.jit
def _multiply(
    a, b, out, scales_a, scales_b, bias, hidden, up, m, n, k, rank, hidden_stride, up_stride_rank, up_stride_n,
    HAS_SCALES_B: tl.constexpr, HAS_BIAS: tl.constexpr, ROTATED: tl.constexpr, HAS_LORA: tl.constexpr,
    MATRIX: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, TILE_RANK: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``a b^T``, ``a`` [m, k] and ``b`` [n, k], and its epilogue."""
    # Programs of a group of rows run together, so that they share columns of b in the L2 cache.
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    group = program // (GROUP * tiles_n)
    members = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + program % (GROUP * tiles_n) % members
    tile_n = program % (GROUP * tiles_n) // members
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_n * TILE_N + tl.arange(0, TILE_N)
    inner = tl.arange(0, TILE_K)
    # Rows and columns outside the product read others, and are not stored.
    pointers_a = a + (rows % m)[:, None].to(tl.int64) * k + inner[None, :]
    pointers_b = b + (columns % n)[None, :].to(tl.int64) * k + inner[:, None]
    SUMS: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else tl.float32
    accumulator = tl.zeros((TILE_M, TILE_N), SUMS)
    for start in range(0, k, TILE_K):
        if EVEN:
            tile_a, tile_b = tl.load(pointers_a), tl.load(pointers_b)
        else:
            tile_a = tl.load(pointers_a, mask=inner[None, :] < k - start, other=0.0)
            tile_b = tl.load(pointers_b, mask=inner[:, None] < k - start, other=0.0)
        accumulator = tl.dot(tile_a, tile_b, accumulator, out_dtype=SUMS)
        pointers_a += TILE_K
        pointers_b += TILE_K
    values = accumulator.to(tl.float32) * tl.load(scales_a + rows, mask=rows < m, other=0.0)[:, None]
    if HAS_SCALES_B:
        values *= tl.load(scales_b + columns, mask=columns < n, other=0.0)[None, :]
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    if ROTATED:
        # An element can be eight times as large before the rotation as after it, which fp16 could not represent.
        blocks = (values * (1 / 8)).to(dtype).to(MATRIX).reshape(TILE_M * TILE_N // SIZE, SIZE)
        values = tl.dot(blocks, _hadamard(SIZE, 1.0, MATRIX), input_precision="ieee").reshape(TILE_M, TILE_N)
    if HAS_LORA:
        inner = tl.arange(0, TILE_RANK)
        pointers_a = hidden + rows[:, None].to(tl.int64) * hidden_stride + inner[None, :]
        pointers_b = up + columns[None, :].to(tl.int64) * up_stride_n + inner[:, None] * up_stride_rank
        for start in tl.range(0, rank, TILE_RANK, num_stages=1):  # few passes, whose buffers would displace the product's
            tile_a = tl.load(pointers_a, mask=(rows < m)[:, None] & (inner < rank - start)[None, :], other=0.0)
            tile_b = tl.load(pointers_b, mask=(inner < rank - start)[:, None] & (columns < n)[None, :], other=0.0)
            values = tl.dot(tile_a.to(MATRIX), tile_b.to(MATRIX), values, input_precision="ieee")
            pointers_a += TILE_RANK
            pointers_b += TILE_RANK * up_stride_rank
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * n + columns[None, :], values.to(dtype), mask=inside)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

#: The dtype in which rows are rotated. Triton's interpreter cannot multiply bf16.
_MATRICES = _DTYPES if isinstance(_multiply, triton.runtime.JITFunction) else dict.fromkeys(_DTYPES, tl.float32)


def launch(width: int) -> tuple[int, int]:
    """Return the blocks and warps of a program that quantizes a row. Tensor cores rotate 16 blocks or more."""
    blocks = max(16, triton.next_power_of_2(triton.cdiv(width, BLOCK)))
    return blocks, min(16, blocks // 16)


def quantize(x: Any, kind: Any, dtype: Any, *, rotated: bool = False, factors: Any = None) -> tuple[Any, Any]:
    """Return the rows of ``x`` [m, k] in the 8-bit format ``kind``, and the scale of each row [m], fp32.

    ``x`` is rounded to ``dtype``. Then its rows are rotated, or its columns multiplied by the fp32 ``factors`` [k].
    """
    m, k = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((m, k), dtype=kind, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    blocks, warps = launch(k)
    _quantize_rows[(m,)](
        x, factors, out, scales, k, x.stride(0),
        ROTATED=rotated, HAS_FACTORS=factors is not None, DTYPE=_DTYPES[dtype], MATRIX=_MATRICES[dtype],
        LARGEST=LARGEST[kind], TINY=TINY, BLOCKS=blocks, SIZE=BLOCK, num_warps=warps,
    )  # fmt: skip
    return out, scales


def transpose(x: Any) -> Any:
    """Return a contiguous copy of ``x``, [rows, columns] of one byte per element, as [columns, rows]."""
    rows, columns = x.shape
    out = torch.empty((columns, rows), dtype=x.dtype, device=x.device)
    _transpose[(triton.cdiv(rows, 64), triton.cdiv(columns, 64))](x, out, rows, columns, TILE=64, num_warps=4)
    return out


#: Tiles of a product: rows, columns, inner size, warps, stages. The small ones are for products with few tiles.
TILES = (128, 128, 128, 8, 3)
SMALL_TILES = (64, 128, 128, 4, 4)


def tiles(m: int, n: int, device: Any) -> tuple[int, int, int, int, int]:
    """Return the tiles of a product [m, n]: small ones if it has fewer large tiles than the GPU has multiprocessors."""
    count = triton.cdiv(m, TILES[0]) * triton.cdiv(n, TILES[1])
    return TILES if count >= torch.cuda.get_device_properties(device).multi_processor_count else SMALL_TILES


def tile_of_rank(rank: int) -> int:
    """Return the part of a LoRA's rank that one pass of the epilogue multiplies. Tensor cores need 16."""
    return max(16, min(32, int(triton.next_power_of_2(rank))))


def multiply(
    a: Any, b: Any, scales_a: Any, dtype: Any, tile: tuple[int, int, int, int, int], *,
    scales_b: Any = None, bias: Any = None, rotated: bool = False, lora: LoRA | None = None,
) -> Any:  # fmt: skip
    """Return ``(a b^T) scales_a scales_b + bias`` in ``dtype``, its rows then rotated if wanted, plus the LoRA's product.

    Shapes: ``a`` [m, k] and ``b`` [n, k], both int8 or fp8; ``scales_a`` [m] and ``scales_b`` [n], fp32; ``bias`` [n]; the
    result is [m, n]. ``tile`` is one of :func:`tiles`. The LoRA's hidden rows may be some columns of a wider tensor.
    """
    (m, k), n = a.shape, b.shape[0]
    hidden, up = (None, None) if lora is None else lora
    rank, strides = (0, (0, 0, 0)) if lora is None else (lora[1].shape[0], (lora[0].stride(0), *lora[1].stride()))
    out = torch.empty((m, n), dtype=dtype, device=a.device)
    tile_m, tile_n, tile_k, warps, stages = tile
    _multiply[(triton.cdiv(m, tile_m) * triton.cdiv(n, tile_n),)](
        a, b, out, scales_a, scales_b, bias, hidden, up, m, n, k, rank, *strides,
        HAS_SCALES_B=scales_b is not None, HAS_BIAS=bias is not None, ROTATED=rotated, HAS_LORA=lora is not None,
        MATRIX=_MATRICES[dtype], EVEN=k % tile_k == 0, TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k,
        TILE_RANK=tile_of_rank(rank), GROUP=8, SIZE=BLOCK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _product(
    a: Any, b: Any, scales_a: Any, dtype: Any, lora: LoRA | None, by_torch: bool, scales_b: Any = None, bias: Any = None
) -> Any:
    if a.dtype is torch.int8 or dtype is not torch.bfloat16 or not by_torch:  # torch's scaled product returns bf16
        tile = tiles(a.shape[0], b.shape[0], a.device)
        rotated = a.dtype in ROTATED and scales_b is None
        return multiply(a, b, scales_a, dtype, tile, scales_b=scales_b, bias=bias, rotated=rotated, lora=lora)
    columns = scales_a.new_ones(1, b.shape[0]) if scales_b is None else scales_b[None]
    out = torch._scaled_mm(a, b.t(), scale_a=scales_a[:, None], scale_b=columns, bias=bias, out_dtype=dtype)
    return out if lora is None else out.addmm_(*lora)


def quantized_input(x: Any, kind: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the rows ``x`` [m, k] as :func:`forward` reads them, and the scale of each row."""
    return quantize(x, kind, dtype, rotated=kind in ROTATED)


def forward(
    rows: tuple[Any, Any], weight: Any, scales: Any, bias: Any, dtype: Any, lora: LoRA | None = None, *, by_torch: bool = True
) -> Any:
    """Return ``x W^T + bias`` in ``dtype``, plus the LoRA's product, for a :func:`quantized_input` and a ``weight`` [n, k].

    ``by_torch`` lets torch multiply fp8 rows in bf16, which some of its builds cannot.
    """
    quantized, row_scales = rows
    return _product(quantized, weight.view(quantized.dtype), row_scales, dtype, lora, by_torch, scales, bias)


def backward(
    gradient: Any, weight: Any, scales: Any, dtype: Any, kind: Any, lora: LoRA | None = None, *, by_torch: bool = True
) -> Any:
    """Return ``gradient W`` in ``dtype``, plus the LoRA's product, for output gradients [m, n].

    Tensor cores read both 8-bit operands along the inner dimension, so the weight is transposed. An H100 needs a tenth of the
    product's time for it, and five times the product's time to read the weight as it is.
    """
    rows, row_scales = quantize(gradient, kind, dtype, factors=scales)
    return _product(rows, transpose(weight).view(kind), row_scales, dtype, lora, by_torch)
