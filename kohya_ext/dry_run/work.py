"""Counts of a step's kernels: number, FLOPs and bytes through memory, as groups of similar size.

:class:`Counter` sees each operator of a step on fake tensors and adds the kernels that CUDA runs for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from kohya_ext.dry_run import workspaces
from kohya_ext.dry_run.triton_kernels import lora_flops, rotation_flops
from kohya_ext.estimate.gpus import FP8, FP32, INT8, SIXTEEN_BITS
from kohya_ext.estimate.seconds import ATTENTION, CONVOLUTION, MASKED_ATTENTION, MEMORY, ROTATION, Kernels, Work

_aten = torch.ops.aten

#: Kernels that CUDA runs for one operator, where it is not 1. The normalizations are PyTorch's own; convolutions are cuDNN's,
#: with a change of layout before and after. Memory-efficient attention also sets two numbers and a workspace to zero.
_KERNELS = {
    _aten.native_group_norm: 3,
    _aten.native_group_norm_backward: 4,
    _aten.convolution: 3,
    _aten.convolution_backward: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 3,
    _aten._scaled_dot_product_flash_attention_backward: 3,
    _aten._scaled_dot_product_efficient_attention: 3,
    _aten._scaled_dot_product_efficient_attention_backward: 2,
}

#: The CPU's attention -> the GPU's with a mask.
_WITH_MASK = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_efficient_attention_backward,
}

#: Position of the mask among the arguments of the GPU's attention. The CPU's has it among the keywords.
_MASKS = {
    _aten._scaled_dot_product_efficient_attention: 3,
    _aten._scaled_dot_product_efficient_attention_backward: 4,
}

#: Operators without a kernel that are not views by their schema. Optimizers read ``_local_scalar_dense`` of host tensors only.
_NO_KERNEL = frozenset(
    (
        *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.empty_permuted),
        *(_aten._unsafe_view, _aten._local_scalar_dense, _aten.resize_, _aten.set_, _aten.lift_fresh),
    )
)

#: Reads and writes of a convolution's operands: the change of layout reads and writes each of them once more.
_LAYOUT_PASSES = 3

#: Tensors and chunks of 65,536 elements in one launch of a kernel over lists of tensors, by the number of lists.
#: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/MultiTensorApply.cuh
_TENSORS_BY_LISTS = (110, 110, 64, 48, 36, 30)
_CHUNK, _CHUNKS = 65536, 320

#: Groups contain kernels whose FLOPs or bytes differ by less than this factor.
_STEP = 4


class Launcher(Enum):
    """What launches a kernel, which determines its cost for the host."""

    PYTHON = "forward and recomputation, operator by operator"
    ENGINE = "autograd's engine, or compiled code"
    OPTIMIZER = "the optimizer"


class Counter:
    """Adds up the kernels of a step, those of the optimizer separately."""

    def __init__(self) -> None:
        self._groups: dict[tuple[bool, str, int], list[float]] = {}
        self._from_python = 0
        self._waits = 0

    def operator(self, func: Any, args: Any, kwargs: Any, result: Any, flops: int, launcher: Launcher) -> None:
        """Add the kernels of one operator; none for a view."""
        if not computes(func):
            return
        lists = [value for value in args if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor)]
        name = func._schema.name
        if lists and ("::_foreach" in name or "::_fused" in name):
            size = sum(_bytes(tensors) for tensors in lists) * 4 / 3  # of three lists, one is written too
            self.add(MEMORY, multi_tensor_launches(lists), 0, size, launcher)
            return
        packet = func._overloadpacket
        size = _bytes(tree_iter(args)) + _bytes(tree_iter(kwargs)) + _bytes(tree_iter(result))
        kind = _kind(packet, args, kwargs) if flops else MEMORY
        if kind is CONVOLUTION:
            size *= _LAYOUT_PASSES
        if kind is MASKED_ATTENTION:
            packet = _WITH_MASK.get(packet, packet)
        self.add(kind, _KERNELS.get(packet, 1), flops, size, launcher)
        if kind in (ATTENTION, MASKED_ATTENTION):
            for copied in filter(None, workspaces.before(func, args, kwargs)):
                self.add(MEMORY, 1, 0, 2 * copied, launcher)
        for inner, operations in ((ROTATION, rotation_flops(func, args)), (SIXTEEN_BITS, lora_flops(func, args))):
            if operations:  # in the same kernel
                self.add(inner, 0, operations, 0, launcher)

    def add(self, kind: str, kernels: int, flops: float, size: float, launcher: Launcher) -> None:
        """Add one operator's kernels: FLOPs and bytes are those of all of them."""
        bin_of = flops or size
        key = launcher is Launcher.OPTIMIZER, kind, int(math.log(bin_of, _STEP)) if bin_of >= 1 else 0
        group = self._groups.setdefault(key, [0, 0.0, 0.0])
        group[0] += kernels
        group[1] += flops
        group[2] += size
        if launcher is Launcher.PYTHON:
            self._from_python += kernels

    def kernel(self, *values: Any, launcher: Launcher) -> None:
        """Add a kernel that reads and writes the tensors in ``values`` and does little else."""
        self.add(MEMORY, 1, 0, _bytes(tree_iter(values)), launcher)

    def wait(self) -> None:
        """Add a wait of the host for the GPU."""
        self._waits += 1

    def work(self, copied: int = 0, returned: int = 0) -> Work:
        """Return the counts so far, with the bytes that a micro-batch copies to the GPU and back to the host."""

        def part(optimizer: bool) -> tuple[Kernels, ...]:
            return tuple(
                Kernels(kind, int(count), flops, size)
                for (at, kind, _), (count, flops, size) in sorted(self._groups.items())
                if at == optimizer
            )

        return Work(part(False), part(True), self._from_python, copied, returned, self._waits)


def multi_tensor_launches(lists: Sequence[Sequence[Any]]) -> int:
    """Return the launches of an operator over lists of tensors: each takes a number of tensors and of chunks."""
    tensors = lists[0]
    chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    most = _TENSORS_BY_LISTS[min(len(lists), len(_TENSORS_BY_LISTS) - 1)]
    return int(max(-(-len(tensors) // most), -(-chunks // _CHUNKS)))


@functools.cache
def computes(func: Any) -> bool:
    """Return whether an operator launches a kernel: it writes to an argument, or returns new tensors with values."""
    schema = func._schema
    if func._overloadpacket in _NO_KERNEL or func.namespace in ("prim", "profiler"):
        return False
    return schema.is_mutable or not any(returned.alias_info is not None for returned in schema.returns)


def _kind(packet: Any, args: Any, kwargs: Any) -> str:
    name = packet.__name__
    if "attention" in name:
        position = _MASKS.get(packet)
        mask = kwargs.get("attn_mask") if position is None else args[position]
        return ATTENTION if mask is None else MASKED_ATTENTION
    if "convolution" in name:
        return CONVOLUTION
    return _PRODUCTS.get(next(value.dtype for value in args if isinstance(value, torch.Tensor)), FP32)


#: Type of a matrix product's operands -> its kind.
_PRODUCTS = {
    torch.bfloat16: SIXTEEN_BITS,
    torch.float16: SIXTEEN_BITS,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
    torch.float8_e5m2: FP8,
}


def _bytes(values: Iterable[Any]) -> int:
    """Return the bytes of some tensors; an expanded one counts as its storage."""
    return sum(
        min(value.numel() * value.element_size(), value.untyped_storage().nbytes())
        for value in values
        if isinstance(value, torch.Tensor)
    )
