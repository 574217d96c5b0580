"""AdamW's step of a bf16 weight with bf16 states in one Triton kernel, which rounds stochastically.

It reads and writes 14 bytes for each element, 18 with master weights; with float32 copies, PyTorch's operators and random bits
in memory it is 140.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kohya_ext.kernels.rounding import joined, rounded, split

_TILE = {"TILE": 1024, "num_warps": 4}

_ROUNDS = tl.constexpr(7)
"""Of Philox. Fewer than Triton's 10, and enough for every known test of randomness.

Source: J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, https://doi.org/10.1145/2063384.2063405, table 2.
"""


@triton.jit
def _adamw(
    weight, lower, gradient, average, average_of_squares, seed,
    size, of_gradient, kept, of_square, correction, eps, rate, decay,
    IS_MASTER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Step a tile of the weights and their states."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    grad = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(average + at, mask=inside, other=0.0).to(tl.float32)
    mean += (grad - mean) * of_gradient
    square = tl.load(average_of_squares + at, mask=inside, other=0.0).to(tl.float32) * kept + grad * grad * of_square
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if IS_MASTER:
        value = joined(value, tl.load(lower + at, mask=inside, other=0))
    value -= decay * value
    value -= rate * mean / (tl.sqrt(square) * correction + eps)
    low, high, other, _ = tl.randint4x(tl.load(seed), at, _ROUNDS)
    dtype = weight.dtype.element_ty
    tl.store(average + at, rounded(mean, low & 0xFFFF).to(dtype), mask=inside)
    tl.store(average_of_squares + at, rounded(square, high & 0xFFFF).to(dtype), mask=inside)
    if IS_MASTER:
        value, bits = split(value, other & 0xFFFF)
        tl.store(lower + at, bits, mask=inside)
    else:
        value = rounded(value, other & 0xFFFF)
    tl.store(weight + at, value.to(dtype), mask=inside)


def step(
    weight: Any,
    gradient: Any,
    average: Any,
    average_of_squares: Any,
    seed: Any,
    *,
    number: float,
    betas: tuple[float, float],
    eps: float,
    rate: float,
    decay: float,
    lower: Any = None,
) -> None:
    """Step contiguous bf16 tensors of one shape on one GPU: a weight, and the averages of its gradients and of their squares.

    ``seed``: int64, one element. ``number`` of the step, from 1. ``decay``: the share of themselves that weights lose.
    ``lower``: the lower halves of a master weight, int16 of its shape.
    Source: I. Loshchilov and F. Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101, algorithm 2.
    """
    first, second = betas
    size = weight.numel()
    _adamw[(triton.cdiv(size, _TILE["TILE"]),)](
        *(weight, lower, gradient, average, average_of_squares, seed, size, 1 - first, second, 1 - second),
        *((1 - second**number) ** -0.5, eps, rate / (1 - first**number), decay),
        IS_MASTER=lower is not None,
        **_TILE,
    )
