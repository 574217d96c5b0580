"""Memory that operators use on CUDA while they run, in addition to their results.

Their sizes and whether they are allocated before or after the results are those of traces of PyTorch's allocator
(tests/cuda/test_operator_memory.py). Sources: group_norm, layer_norm, Convolution, UpSample and SoftMax in
https://github.com/pytorch/pytorch/tree/main/aten/src/ATen/native, and _flash_attention_backward in
aten/src/ATen/native/transformers/cuda/attention_backward.cu.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch._prims_common import suggest_memory_format

_aten = torch.ops.aten

_MATRIX_PRODUCTS = frozenset((_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default))

#: Multiprocessors of the GPU and threads of each: an RTX 4090. A GPU with fewer needs less.
PROCESSORS, THREADS = 128, 1536

#: The CPU's attention and its backward pass. CUDA has flash attention and memory-efficient attention for them.
FLASH_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: CUDA's own, in compiled code.
CUDA_FLASH_ATTENTION = _aten._scaled_dot_product_flash_attention.default
CUDA_FLASH_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
MEMORY_EFFICIENT_ATTENTION = _aten._scaled_dot_product_efficient_attention.default
MEMORY_EFFICIENT_ATTENTION_BACKWARD = _aten._scaled_dot_product_efficient_attention_backward.default

#: Largest width of a head in flash attention.
WIDEST_FLASH = 256

#: (arguments, keyword arguments) of an operator -> the bytes of each tensor that it uses; 0 for none.
Workspace = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[int]]


def before(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the bytes of each tensor that an operator allocates before its results, and frees."""
    return _BEFORE[operator](args, kwargs) if operator in _BEFORE else ()


def uses_cublas(operator: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator calls cuBLAS, which batched outer products do not: they are elementwise."""
    return operator in _MATRIX_PRODUCTS and not (operator is _aten.bmm.default and args[0].shape[-1] == 1)


def laid_out(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return an operator's results with the strides that they have on CUDA, where a CPU's differ.

    Gradients of flash attention have the layouts of its inputs (``mha_bwd`` in flash_api.cpp). Those of memory-efficient
    attention are contiguous as (batch, length, heads, width), as all of a CPU's are.
    """
    if operator in _CONTIGUOUS:
        return tuple(tensor if tensor is None else tensor.contiguous() for tensor in result)
    if operator is FLASH_ATTENTION and not uses_flash(args[0], kwargs):
        return (result[0].transpose(1, 2).contiguous().transpose(1, 2), *result[1:])
    if operator is FLASH_ATTENTION_BACKWARD and uses_flash(args[1], kwargs):
        return tuple(torch.empty_like(value).copy_(gradient) for value, gradient in zip(args[1:4], result, strict=True))
    return result


def after(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the bytes of each tensor that an operator allocates after its results, and frees."""
    return _AFTER[operator](args, kwargs) if operator in _AFTER else ()


def _copies(*indexes: int) -> Workspace:
    """Return the workspace of an operator whose kernel reads these arguments in contiguous memory."""
    return lambda args, kwargs: [_copied_bytes(args[index]) for index in indexes]


def _copied_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's contiguous copy; 0 if it is contiguous."""
    return 0 if tensor.is_contiguous() else _bytes(tensor)


def _copies_in_layout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the copy of an input that is contiguous neither as it is nor with its channels last."""
    return (_bytes_in_layout(args[0], suggest_memory_format(args[0])),)


def _bytes_in_layout(tensor: Any, layout: torch.memory_format) -> int:
    """Return the bytes of a tensor's copy in a layout; 0 if it has it."""
    return 0 if tensor.is_contiguous(memory_format=layout) else _bytes(tensor)


def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the copies of input and weight in the layout that cuDNN computes in."""
    layout = _layout(*args[:2])
    return [_bytes_in_layout(tensor, layout) for tensor in args[:2]]


def _convolution_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the copies of a gradient in another layout than the input's, and of the input for the weight's gradient."""
    gradient, image, weight, *_, computed = args
    is_other = suggest_memory_format(gradient) is not suggest_memory_format(image)
    for_weight = _bytes_in_layout(image, _layout(image, weight)) if computed[1] else 0
    return for_weight, _bytes(gradient) if is_other else 0


def _convolution_backward_after(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the copy of a gradient in the input's layout that is a part of another tensor."""
    layout = suggest_memory_format(args[1])
    return (_bytes_in_layout(args[0], layout) if suggest_memory_format(args[0]) is layout else 0,)


def _layout(*tensors: Any) -> torch.memory_format:
    """Return the layout in which cuDNN computes with some tensors: channels last if one of them has it."""
    has_channels_last = any(suggest_memory_format(tensor) is torch.channels_last for tensor in tensors)
    return torch.channels_last if has_channels_last else torch.contiguous_format


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def uses_flash(query: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether CUDA computes attention with flash attention: in 16 bits, without a mask, of heads that are not too wide.

    ``can_use_flash_attention`` in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
    """
    return kwargs.get("attn_mask") is None and query.shape[-1] <= WIDEST_FLASH and query.element_size() == 2


def _copies_for_attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the copies of a gradient and an output whose (batch, length, heads, width) is not contiguous.

    The output of memory-efficient attention always is.
    """
    return [_copied_bytes(tensor.transpose(1, 2)) for tensor in (args[0], args[4])]


def _attention_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return a sum per query and the gradients in fp32, of rounded sizes.

    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd)
    """
    if not uses_flash(args[1], kwargs):
        return _memory_efficient_backward(*args[1:3])
    batch, heads, length, width = args[1].shape
    rows = batch * heads * _rounded(length, 128)
    return 4 * rows, 4 * rows * _rounded_width(width)


def _memory_efficient_backward(query: Any, key: Any) -> Sequence[int]:
    """Return what memory-efficient attention uses: a sum per query, and the gradients of a head that are sums of parts.

    Those of keys and values are sums in 16 bits only, of heads wider than 96. The tiles are those of compute capability 8.0 and
    newer. ``workspace_elements_gq`` and ``_gk`` in
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h
    """
    batch, heads, length, width = query.shape
    halves = query.element_size() == 2
    rows = 128 if halves and (64 < width <= 96 or width > 128) else 64  # of a tile
    of_queries = -(-length // rows) * -(-width // 64) * (rows * 64 + 4)  # 4: a tile's lock and counter
    keys = -(-key.shape[2] // 64)
    parts = min(keys, max(1, 200 // (batch * heads)))
    of_keys = 2 * parts * 64 * _rounded(width, rows) if halves and width > 96 else 0
    return 4 * batch * heads * length, 4 * batch * heads * _rounded(of_queries + of_keys, 4)


def _attention(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the sums and outputs of the parts of keys that blocks share, where queries alone would leave most of a GPU idle.

    ``num_splits_heuristic`` and ``set_params_splitkv`` of the same file. Memory-efficient attention of wide heads has an output
    in fp32 instead (``kNeedsOutputAccumulatorBuffer`` in mem_eff_attention/kernel_forward.h).
    """
    batch, heads, length, width = args[0].shape
    if not uses_flash(args[0], kwargs):
        return (4 * args[0].numel() if width > 128 and args[0].element_size() == 2 else 0,)
    keys = -(-args[1].shape[2] // (256 if width <= 64 else 128 if width <= 128 else 64))  # blocks
    blocks, places = batch * heads * -(-length // 64), 2 * PROCESSORS
    parts = 1 if blocks >= 0.8 * places else _parts(blocks, places, keys)
    rows = 4 * parts * batch * heads * length
    return (rows, rows * _rounded_width(width)) if parts > 1 else ()


def _parts(blocks: int, places: int, keys: int) -> int:
    """Return the smallest number of parts that uses 85% of the places that the best one uses."""
    possible = [
        count for count in range(1, min(128, places, keys) + 1) if count == 1 or -(-keys // count) != -(-keys // (count - 1))
    ]
    used = {count: (waves := blocks * count / places) / math.ceil(waves) for count in possible}
    return next(count for count in possible if used[count] >= 0.85 * max(used.values()))


def _rounded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _rounded_width(width: int) -> int:
    """Return the width that flash attention computes with. torch 2.6 rounds every width to a multiple of 32."""
    return _rounded(width, 32 if width <= 128 else 64)


def _softmax_backward(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    """Return the product of gradient and output, and the output's copy."""
    return _bytes(args[0]), _copied_bytes(args[1])


# --- reductions ------------------------------------------------------------------------------------------------------

#: Threads of a block; bytes of an accumulator; numbers that a thread adds before more blocks share an output.
BLOCK_THREADS, ACCUMULATOR, MIN_VALUES, MAX_VALUES = 512, 4, 16, 256
WARP = 32


def _partial_sums(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[int]:
    return (buffer_bytes(args[0].shape, args[0].stride(), args[1] or ()),)


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


#: Operators whose results are contiguous on CUDA.
_CONTIGUOUS = frozenset((_aten.native_group_norm_backward.default,))

_BEFORE: Mapping[Any, Workspace] = {
    FLASH_ATTENTION_BACKWARD: _copies_for_attention,
    CUDA_FLASH_ATTENTION_BACKWARD: _copies_for_attention,
    MEMORY_EFFICIENT_ATTENTION_BACKWARD: lambda args, kwargs: (_copied_bytes(args[0].transpose(1, 2)),),
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_group_norm_backward.default: _copies(0),
    _aten.native_layer_norm.default: _copies(0),
    _aten.native_layer_norm_backward.default: _copies(1),
}

_AFTER: Mapping[Any, Workspace] = {
    FLASH_ATTENTION: _attention,
    FLASH_ATTENTION_BACKWARD: _attention_backward,
    CUDA_FLASH_ATTENTION: _attention,
    CUDA_FLASH_ATTENTION_BACKWARD: _attention_backward,
    MEMORY_EFFICIENT_ATTENTION: lambda args, kwargs: _attention(args, {"attn_mask": args[3]}),
    MEMORY_EFFICIENT_ATTENTION_BACKWARD: lambda args, kwargs: _memory_efficient_backward(*args[1:3]),
    _aten.convolution_backward.default: _convolution_backward_after,
    # PyTorch 2.15 has a kernel for images whose channels are last.
    _aten.native_group_norm.default: _copies_in_layout if Version(torch.__version__) >= Version("2.15") else _copies(0),
    _aten.native_layer_norm_backward.default: _copies(0),
    _aten.upsample_nearest2d.default: _copies_in_layout,
    _aten.upsample_nearest2d_backward.default: _copies_in_layout,
    _aten._softmax.default: _copies(0),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.sum.dim_IntList: _partial_sums,
    _aten.mean.dim: _partial_sums,
}
