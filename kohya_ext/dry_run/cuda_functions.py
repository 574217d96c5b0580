"""``torch.cuda`` and what else asks for a GPU: the answers of an RTX 4090 without memory in use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kohya_ext.dry_run.device import GPU

_PROPERTIES = SimpleNamespace(
    name="NVIDIA GeForce RTX 4090", major=8, minor=9, multi_processor_count=128, max_threads_per_multi_processor=1536,
    total_memory=24 * 2**30, warp_size=32, shared_memory_per_block_optin=101376, regs_per_multiprocessor=65536,
    L2_cache_size=72 * 2**20,
)  # fmt: skip


class _Event:
    """An event, or a stream, on which nothing waits."""

    cuda_stream, device = 0, GPU

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Event:
        return self

    def __exit__(self, *_: object) -> None: ...
    def record(self, *_: object) -> None: ...
    def wait(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


class _Zeros(dict[str, Any]):
    """Memory statistics of 0 under every name."""

    def __missing__(self, key: str) -> Any:
        return 0 if key in ("current", "peak", "allocated", "freed") else _Zeros()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


_ANSWERS = {
    "is_available": True, "is_initialized": True, "current_device": 0, "device_count": 1, "get_device_properties": _PROPERTIES,
    "get_device_capability": (8, 9), "get_device_name": _PROPERTIES.name, "is_bf16_supported": True, "memory_allocated": 0,
    "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "mem_get_info": (24 * 2**30, 24 * 2**30),
    "memory_stats": _Zeros(), "memory_stats_as_nested_dict": _Zeros(), "is_current_stream_capturing": False,
}  # fmt: skip

_IGNORED = (
    "synchronize", "manual_seed", "manual_seed_all", "set_device", "reset_peak_memory_stats", "ipc_collect", "init",
    "set_rng_state", "set_rng_state_all", "_lazy_init",
)  # fmt: skip


def install(empty_cache: Callable[[], None]) -> None:
    """Replace the functions for the rest of the process; ``empty_cache`` runs for ``torch.cuda.empty_cache``."""
    state = torch.zeros(16, dtype=torch.uint8)
    functions = {
        **{name: _always(value) for name, value in _ANSWERS.items()},
        **{name: _always(None) for name in _IGNORED},  # each its own: Dynamo's table has no function twice
        "empty_cache": empty_cache,
        "get_rng_state": _always(state),
        "get_rng_state_all": _always([state]),
        "current_stream": _always(_Event()),
        "default_stream": _always(_Event()),
        "default_generators": (torch.Generator(),),
        "stream": _always(contextlib.nullcontext()),
        "device": _always(contextlib.nullcontext()),
    }
    for name, value in functions.items():
        setattr(torch.cuda, name, value)
    torch.Stream = torch.Event = torch.cuda.Stream = torch.cuda.Event = _Event
    _use_kernels_over_lists()
    _scale_no_loss()


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _use_kernels_over_lists() -> None:
    """Let optimizers and clipping work on lists of tensors, which is their default on a GPU."""
    import torch.nn.utils.clip_grad as clipping
    import torch.optim.optimizer as optimizers
    import torch.utils._foreach_utils as foreach

    optimizers._foreach_supported_types.append(FakeTensor)
    clipping._has_foreach_support = foreach._has_foreach_support = _always(True)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, _always(None))


def _scale_no_loss() -> None:
    """Turn loss scaling off: every value read is 1, which a scaler takes for an overflow, and skips the step."""
    init = torch.amp.GradScaler.__init__

    def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "enabled": False})

    torch.amp.GradScaler.__init__ = disabled
