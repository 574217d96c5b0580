"""The global memory that CUDA's reductions use for partial sums."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Multiprocessors of the GPU and threads of each: an RTX 4090. A GPU with fewer needs less.
PROCESSORS, THREADS = 128, 1536

#: Threads of a block; bytes of an accumulator; numbers that a thread adds before more blocks share an output.
BLOCK_THREADS, ACCUMULATOR, MIN_VALUES, MAX_VALUES = 512, 4, 16, 256
WARP = 32


def buffer_bytes(shape: Sequence[int], stride: Sequence[int], dims: Collection[int]) -> int:
    """Return the bytes for partial sums of a tensor's reduction over ``dims``; 0 if they fit the threads of a block.

    Only where the dimension with the smallest stride is kept, as in the gradient of a bias: in all other cases a buffer is
    smaller than 1 MiB. Source: setReduceConfig and global_memory_size in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Reduce.cuh.
    """
    if not shape:
        return 0
    reduced = {dim % len(shape) for dim in dims} if dims else {*range(len(shape))}
    sizes = [(step, size, dim in reduced) for dim, (size, step) in enumerate(zip(shape, stride, strict=True)) if size > 1]
    inputs = outputs = 1
    for _, size, is_reduced in sizes:
        if is_reduced:
            inputs *= size
        else:
            outputs *= size
    if inputs == 1 or not outputs or not sizes or min(sizes)[2]:
        return 0
    fastest, width, _ = min(sizes)
    vector = next(count for count in (4, 2, 1) if count == 1 or (fastest == 1 and width % count == 0))
    threads = BLOCK_THREADS // vector
    across = min(_power_of_2(outputs // vector), threads)
    down = min(min(_power_of_2(inputs), threads), threads // min(across, WARP))
    across = min(across, threads // down)
    grid = -(-(outputs // vector) // across)
    if inputs < min(16 * down, MAX_VALUES):
        return 0  # each warp has its own output
    values = -(-inputs // down)
    target = PROCESSORS * (THREADS // (across * down))
    if values < MAX_VALUES or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
    return ACCUMULATOR * outputs * blocks * across * vector if blocks > 1 else 0


def _power_of_2(number: int) -> int:
    """Return the largest power of 2 up to a number."""
    return 1 << (number.bit_length() - 1)
