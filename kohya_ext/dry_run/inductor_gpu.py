"""A GPU for inductor that need not exist: graphs moved to it, and what inductor asks it.

Autograd cannot run on fake tensors of a GPU that is not there, so the forward and backward passes of a block are traced as one
graph of CPU operators. :func:`move` turns it into the graph that a GPU would have, before it is partitioned and compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from kohya_ext.dry_run import workspaces
from kohya_ext.patching.attributes import replaced

_aten = torch.ops.aten

GPU = torch.device("cuda", 0)

#: Bytes of the L2 cache of an RTX 4090.
CACHE = 72 * 2**20

#: The properties of an RTX 4090 on which inductor's decisions depend.
_PROPERTIES = SimpleNamespace(
    name="NVIDIA GeForce RTX 4090",
    major=8,
    minor=9,
    multi_processor_count=workspaces.PROCESSORS,
    max_threads_per_multi_processor=workspaces.THREADS,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=101376,
    shared_memory_per_multiprocessor=102400,
    warp_size=32,
    L2_cache_size=CACHE,
    total_memory=24 * 2**30,
)


#: Elements to which memory-efficient attention aligns the rows of masks.
_ALIGNMENT = 8


@contextmanager
def present() -> Iterator[None]:
    """Answer inductor's questions about the GPU inside the block, also in a build of torch without CUDA.

    Its generated code selects no device and asks for no stream.
    """
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    def properties(*_: Any) -> Any:
        return _PROPERTIES

    def capability(*_: Any) -> tuple[int, int]:
        return _PROPERTIES.major, _PROPERTIES.minor

    def copy_(to: Any, source: Any, non_blocking: bool = False) -> Any:
        return _aten.copy_.default(to, source, non_blocking)

    answers: list[tuple[Any, Mapping[str, Any]]] = [
        (
            torch.cuda,
            {
                # The tests for a GPU are passed elsewhere; a real one would only be initialized.
                "is_available": lambda: False,
                "current_device": lambda: GPU.index,
                "get_device_properties": properties,
                "get_device_capability": capability,
            },
        ),
        (
            CudaInterface,
            {
                "current_device": staticmethod(lambda: GPU.index),
                "get_device_properties": staticmethod(properties),
                "get_compute_capability": staticmethod(lambda *_: 10 * _PROPERTIES.major + _PROPERTIES.minor),
                "is_bf16_supported": staticmethod(lambda *_, **__: True),
            },
        ),
        (
            CudaInterface.Worker,
            {"current_device": staticmethod(lambda: GPU.index), "get_device_properties": staticmethod(properties)},
        ),
        (scheduler, {"has_triton": lambda: True}),
        (torch.Tensor, {"copy_": copy_}),  # torch 2.6 selects the tensor's device before it looks whether it is fake
        (
            CUDADeviceOpOverrides,
            {
                "device_guard": lambda *_: "__import__('contextlib').nullcontext()",
                "set_device": lambda *_: "pass",
                "import_get_raw_stream_as": lambda _, name: f"{name} = int",
            },
        ),
    ]
    with ExitStack() as stack:
        for owner, named in answers:
            for name, answer in named.items():
                stack.enter_context(replaced(owner, name, answer))
        yield


def move(module: Any, mode: Any) -> None:
    """Turn a traced graph of CPU operators, a ``torch.fx.GraphModule``, into one of the GPU, with fake tensors of ``mode``."""
    from torch.fx.node import map_aggregate
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    inputs = []
    for node in [*module.graph.nodes]:
        if node.op == "placeholder":
            inputs.append(_moved(node.meta["val"], mode))
        elif node.op == "get_attr":
            setattr(module, node.target, _moved(getattr(module, node.target), mode))
        elif node.target is workspaces.FLASH_ATTENTION:
            _move_attention(node)
        elif node.target is workspaces.FLASH_ATTENTION_BACKWARD:
            _move_attention_backward(node)
        elif node.op == "call_function":
            node.args, node.kwargs = map_aggregate(node.args, _device), map_aggregate(node.kwargs, _device)
    module.recompile()
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*inputs)


def _moved(value: Any, mode: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)


def _device(value: Any) -> Any:
    return GPU if value == torch.device("cpu") else value


def _move_attention(node: Any) -> None:
    """Replace the CPU's attention by the kind that CUDA chooses. Both return the output and its sums first."""
    mask, scale = (node.kwargs.get(name) for name in ("attn_mask", "scale"))
    query, key, value, dropout, causal = _filled(node.args, dropout=0.0, causal=False)
    if workspaces.uses_flash(query.meta["val"], node.kwargs):
        node.target = workspaces.CUDA_FLASH_ATTENTION
        node.args = query, key, value, dropout, causal, False
    else:
        if mask is not None:
            scores = [*query.meta["val"].shape[:3], key.meta["val"].shape[2]]
            with node.graph.inserting_before(node):
                mask = node.graph.call_function(_aten.expand.default, (_padded(mask), scores))
        node.target = workspaces.MEMORY_EFFICIENT_ATTENTION
        node.args = query, key, value, mask, len(node.users) > 1, dropout, causal
    node.kwargs = {"scale": scale}


def _padded(mask: Any) -> Any:
    """Return a mask whose rows are aligned, by padding. CUDA pads each mask whose row length is not known, too.

    ``preprocess_mask`` in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/attention.cpp
    """
    *rows, element = mask.meta["val"].stride()
    if element == 1 and all(isinstance(stride, int) and stride % _ALIGNMENT == 0 for stride in rows):
        return mask
    length = mask.meta["val"].shape[-1]
    padding = [0, _ALIGNMENT - length % _ALIGNMENT]
    padded = mask.graph.call_function(_aten.constant_pad_nd.default, (mask, padding, 0.0))
    return mask.graph.call_function(_aten.slice.Tensor, (padded, len(rows), 0, length))


def _filled(args: tuple[Any, ...], **defaults: Any) -> tuple[Any, ...]:
    """Return an attention's tensors and other positional arguments, with the default of each that is not given."""
    return *args, *[*defaults.values()][len(args) - 3 :]


def _move_attention_backward(node: Any) -> None:
    gradient, query, key, value, output, sums, dropout, causal = node.args
    forward = sums
    while forward.op == "call_function" and forward.target in (operator.getitem, _aten.alias.default, _aten.detach.default):
        forward = forward.args[0]

    def part(index: int) -> Any:
        with node.graph.inserting_after(forward):
            return node.graph.call_function(operator.getitem, (forward, index))

    if forward.target is workspaces.CUDA_FLASH_ATTENTION:
        node.target = workspaces.CUDA_FLASH_ATTENTION_BACKWARD
        lengths = query.meta["val"].shape[2], key.meta["val"].shape[2]
        node.args = gradient, query, key, value, output, sums, None, None, *lengths, dropout, causal, part(6), part(7)
    else:
        node.target = workspaces.MEMORY_EFFICIENT_ATTENTION_BACKWARD
        needs_gradient = [True, True, True, False]  # not the mask
        node.args = (
            *(gradient, query, key, value, forward.args[3], output, sums, part(2), part(3), dropout, needs_gradient, causal),
        )
    node.kwargs = {"scale": node.kwargs.get("scale")}
