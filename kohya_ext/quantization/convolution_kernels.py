"""Triton kernels of 3x3 convolutions in 8 bits: quantize images by pixel, and multiply without a matrix of patches.

Pixels have their own scales, so the integer sums of each tap, one of the nine positions of the weight, are scaled before they
are added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kohya_ext.quantization.arithmetic import LARGEST, TINY
from kohya_ext.quantization.kernels import _DTYPES, _MATRICES, _hadamard, _larger, transpose
from kohya_ext.quantization.rotation import BLOCK

#: Pixels that one program quantizes: a row of their values in one channel is one sector of memory in 16 bits.
PIXELS = 16

#: A program keeps all channels of its pixels up to this number, and reads longer ones twice, in parts of :data:`_PART`.
_KEPT, _PART = 1024, 512


@triton.jit
def _pixel_values(
    x, factors, pixels, channels, area, start,
    ROTATED: tl.constexpr, HAS_FACTORS: tl.constexpr, DTYPE: tl.constexpr, MATRIX: tl.constexpr,
    PIXELS: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return channels from ``start`` of an image's pixels: rotated, or multiplied by the ``factors`` of the channels."""
    columns = start + tl.arange(0, PART)
    inside = (pixels < area)[:, None] & (columns < channels)[None, :]
    values = tl.load(x + columns[None, :].to(tl.int64) * area + pixels[:, None], mask=inside, other=0.0).to(DTYPE)
    if ROTATED:
        blocks = values.to(MATRIX).reshape(PIXELS * PART // SIZE, SIZE)
        values = tl.dot(blocks, _hadamard(SIZE, 1 / 8, MATRIX), input_precision="ieee").reshape(PIXELS, PART)
    else:
        values = values.to(tl.float32)
    if HAS_FACTORS:
        values *= tl.load(factors + columns, mask=columns < channels, other=0.0)[None, :]
    return values


@triton.jit
def _store_pixels(out, values, factor, pixels, channels, area, start, PART: tl.constexpr):
    columns = start + tl.arange(0, PART)
    # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
    quantized = ((values * factor[:, None] + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)
    inside = (pixels < area)[:, None] & (columns < channels)[None, :]
    tl.store(out + pixels[:, None].to(tl.int64) * channels + columns[None, :], quantized, mask=inside)


@triton.jit
def _quantize_pixels(
    x, factors, out, scales, channels, area,
    ROTATED: tl.constexpr, HAS_FACTORS: tl.constexpr, DTYPE: tl.constexpr, MATRIX: tl.constexpr,
    LARGEST: tl.constexpr, TINY: tl.constexpr, PIXELS: tl.constexpr, PART: tl.constexpr, IS_KEPT: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Quantize some pixels of an image, [channels, area] -> [area, channels]. ``IS_KEPT``: a part has all channels."""
    pixels = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image = tl.program_id(1).to(tl.int64)
    x += image * channels * area
    out += image * channels * area
    if IS_KEPT:
        values = _pixel_values(
            x, factors, pixels, channels, area, 0, ROTATED, HAS_FACTORS, DTYPE, MATRIX, PIXELS, PART, SIZE
        )  # fmt: skip
        peak = tl.reduce(tl.abs(values), 1, _larger)
    else:
        peak = tl.zeros((PIXELS,), tl.float32)
        for start in range(0, channels, PART):
            values = _pixel_values(
                x, factors, pixels, channels, area, start, ROTATED, HAS_FACTORS, DTYPE, MATRIX, PIXELS, PART, SIZE
            )  # fmt: skip
            peak = _larger(peak, tl.reduce(tl.abs(values), 1, _larger))
    peak = tl.maximum(peak, TINY, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scales + image * area + pixels, tl.math.div_rn(peak, LARGEST), mask=pixels < area)
    factor = tl.math.div_rn(LARGEST, peak)
    if IS_KEPT:
        _store_pixels(out, values, factor, pixels, channels, area, 0, PART)
    else:
        for start in range(0, channels, PART):
            values = _pixel_values(
                x, factors, pixels, channels, area, start, ROTATED, HAS_FACTORS, DTYPE, MATRIX, PIXELS, PART, SIZE
            )  # fmt: skip
            _store_pixels(out, values, factor, pixels, channels, area, start, PART)


@triton.jit
def _store_products(
    out, values, scales_w, bias, pixels, columns, area, features,
    IS_GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, MATRIX: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store sums [pixels, columns] in an image [columns, area]: scaled, or rotated if they are an input gradient."""
    dtype = out.dtype.element_ty
    if IS_GRADIENT:
        # As in the product of a linear layer: fp16 could not represent some elements before the rotation.
        blocks = (values * (1 / 8)).to(dtype).to(MATRIX).reshape(ROWS * COLUMNS // SIZE, SIZE)
        values = tl.dot(blocks, _hadamard(SIZE, 1.0, MATRIX), input_precision="ieee").reshape(ROWS, COLUMNS)
    else:
        values *= tl.load(scales_w + columns, mask=columns < features, other=0.0)[None, :]
    if HAS_BIAS:
        values += tl.load(bias + columns, mask=columns < features, other=0.0).to(tl.float32)[None, :]
    inside = (pixels < area)[:, None] & (columns < features)[None, :]
    tl.store(out + columns[None, :].to(tl.int64) * area + pixels[:, None], values.to(dtype), mask=inside)


@triton.jit
def _convolve(
    x, w, out, scales_x, scales_w, bias, height, width, channels, features, images, stride_row, stride_tap,
    IS_GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, MATRIX: tl.constexpr,
    TILE_P: tl.constexpr, TILE_O: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute one tile, some pixels of an image and some output channels. A gradient reads mirrored taps of the weight."""
    area = height * width
    # Programs of a group of tiles of pixels run together, so that they share output channels' weights in the L2 cache.
    program = tl.program_id(0)
    in_image = tl.cdiv(area, TILE_P)
    tiles_p, tiles_o = images * in_image, tl.cdiv(features, TILE_O)
    group = program // (GROUP * tiles_o)
    members = min(tiles_p - group * GROUP, GROUP)
    tile_p = group * GROUP + program % (GROUP * tiles_o) % members
    tile_o = program % (GROUP * tiles_o) // members
    image = (tile_p // in_image).to(tl.int64)
    pixels = tile_p % in_image * TILE_P + tl.arange(0, TILE_P)
    # Two products per pass: Triton would keep the next operands of a single one in a register per byte, and spill.
    HALF: tl.constexpr = TILE_O // 2
    columns_0 = tile_o * TILE_O + tl.arange(0, HALF)
    columns_1 = columns_0 + HALF
    # Bit t: whether tap t of a pixel is inside the image.
    line, column = pixels // width, pixels % width
    across = (column > 0).to(tl.int32) + 2 + (column + 1 < width).to(tl.int32) * 4
    taps = (line > 0).to(tl.int32) * across + across * 8 + (line + 1 < height).to(tl.int32) * across * 64
    taps = tl.where(pixels < area, taps, 0)
    inner = tl.arange(0, TILE_K)
    x += image * area * channels
    scales_x += image * area
    offsets_x = pixels[:, None] * channels + inner[None, :]
    # Columns outside the product read others, and are not stored.
    offsets_0 = (columns_0 % features)[None, :] * stride_row + inner[:, None]
    offsets_1 = (columns_1 % features)[None, :] * stride_row + inner[:, None]
    sums_0, sums_1 = tl.zeros((TILE_P, HALF), tl.int32), tl.zeros((TILE_P, HALF), tl.int32)
    values_0, values_1 = tl.zeros((TILE_P, HALF), tl.float32), tl.zeros((TILE_P, HALF), tl.float32)
    tap, start = -1, channels - TILE_K
    for _ in range(0, 9 * channels, TILE_K):
        # Outside the condition below, so that the loads of later passes need not wait for it.
        is_first = start + TILE_K == channels
        tap += is_first.to(tl.int32)
        start = tl.where(is_first, 0, start + TILE_K)
        shift = (tap // 3 - 1) * width + tap % 3 - 1
        inside = (taps >> tap & 1) != 0
        tile_x = tl.load(x + (shift * channels + start) + offsets_x, mask=inside[:, None], other=0)
        part = w + ((8 - tap if IS_GRADIENT else tap) * stride_tap + start)
        sums_0 = tl.dot(tile_x, tl.load(part + offsets_0), sums_0, out_dtype=tl.int32)
        sums_1 = tl.dot(tile_x, tl.load(part + offsets_1), sums_1, out_dtype=tl.int32)
        if start + TILE_K == channels:
            of_pixels = tl.load(scales_x + shift + pixels, mask=inside, other=0.0)[:, None]
            values_0 += sums_0.to(tl.float32) * of_pixels
            values_1 += sums_1.to(tl.float32) * of_pixels
            sums_0, sums_1 = tl.zeros((TILE_P, HALF), tl.int32), tl.zeros((TILE_P, HALF), tl.int32)
    out += image * features * area
    _store_products(
        out, values_0, scales_w, bias, pixels, columns_0, area, features, IS_GRADIENT, HAS_BIAS, MATRIX, TILE_P, HALF, SIZE
    )
    _store_products(
        out, values_1, scales_w, bias, pixels, columns_1, area, features, IS_GRADIENT, HAS_BIAS, MATRIX, TILE_P, HALF, SIZE
    )


def launch(channels: int) -> tuple[int, bool, int]:
    """Return the channels that a program reads together, whether it keeps all of them, and its warps."""
    if channels > _KEPT:
        return _PART, False, 8
    part = max(2 * BLOCK, triton.next_power_of_2(channels))
    return part, True, max(4, part // 128)


def quantize(x: Any, dtype: Any, *, rotated: bool = False, factors: Any = None) -> tuple[Any, Any]:
    """Return images ``x`` [n, c, h, w] as int8 [n, h, w, c], and the scale of each pixel [n, h, w], fp32.

    ``x`` is rounded to ``dtype``. Then its channels are rotated, or multiplied by the fp32 ``factors`` [c].
    """
    x = x.contiguous()
    n, c, h, w = x.shape
    out = torch.empty((n, h, w, c), dtype=torch.int8, device=x.device)
    scales = torch.empty((n, h, w), dtype=torch.float32, device=x.device)
    part, is_kept, warps = launch(c)
    _quantize_pixels[(triton.cdiv(h * w, PIXELS), n)](
        x, factors, out, scales, c, h * w,
        ROTATED=rotated, HAS_FACTORS=factors is not None, DTYPE=_DTYPES[dtype], MATRIX=_MATRICES[dtype],
        LARGEST=LARGEST[torch.int8], TINY=TINY, PIXELS=PIXELS, PART=part, IS_KEPT=is_kept, SIZE=BLOCK, num_warps=warps,
    )  # fmt: skip
    return out, scales


#: Tiles of a convolution: pixels, output channels, input channels, warps, stages. The first is for input channels that are a
#: multiple of 128. The small ones are for convolutions with few tiles.
TILES, NARROW_TILES, SMALL_TILES = (128, 128, 128, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 4)


def tiles(x: Any, features: int) -> tuple[int, int, int, int, int]:
    """Return the tiles for images [n, h, w, c]: small ones if there are fewer large tiles than multiprocessors."""
    n, h, w, c = x.shape
    count = n * triton.cdiv(h * w, TILES[0]) * triton.cdiv(features, TILES[1])
    if count < torch.cuda.get_device_properties(x.device).multi_processor_count:
        return SMALL_TILES
    return TILES if c % TILES[2] == 0 else NARROW_TILES


def convolve(
    pixels: tuple[Any, Any], weight: Any, dtype: Any, tile: tuple[int, int, int, int, int], *,
    scales: Any = None, bias: Any = None,
) -> Any:  # fmt: skip
    """Return images [n, o, h, w] in ``dtype``: a convolution with ``scales`` [o], or an input gradient, rotated, without them.

    ``pixels`` are from :func:`quantize`. ``weight`` is int8, of a convolution [o, 9 c], of a gradient [9 o, c].
    """
    (x, scales_x), is_gradient = pixels, scales is None
    n, h, w, c = x.shape
    features, strides = (weight.shape[0] // 9, (c, weight.numel() // 9)) if is_gradient else (weight.shape[0], (9 * c, c))
    out = torch.empty((n, features, h, w), dtype=dtype, device=x.device)
    tile_p, tile_o, tile_k, warps, stages = tile
    _convolve[(n * triton.cdiv(h * w, tile_p) * triton.cdiv(features, tile_o),)](
        x, weight, out, scales_x, scales, bias, h, w, c, features, n, *strides,
        IS_GRADIENT=is_gradient, HAS_BIAS=bias is not None, MATRIX=_MATRICES[dtype],
        TILE_P=tile_p, TILE_O=tile_o, TILE_K=tile_k, GROUP=8, SIZE=BLOCK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def forward(x: Any, weight: Any, scales: Any, bias: Any, dtype: Any) -> Any:
    """Return the convolution of ``x`` [n, c, h, w] with a ``weight`` [o, 9 c] in ``dtype``."""
    pixels = quantize(x, dtype, rotated=True)
    return convolve(pixels, weight, dtype, tiles(pixels[0], weight.shape[0]), scales=scales, bias=bias)


def backward(gradient: Any, weight: Any, scales: Any, dtype: Any) -> Any:
    """Return the input gradient [n, c, h, w] in ``dtype`` for output gradients [n, o, h, w]."""
    pixels = quantize(gradient, dtype, factors=scales)
    return convolve(pixels, transpose(weight), dtype, tiles(pixels[0], weight.shape[1] // 9))
