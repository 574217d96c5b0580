"""The first of several processes that do not exist: PyTorch's "fake" communication copies nothing.

What DistributedDataParallel allocates does not depend on what it receives.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from kohya_ext.config.command_line import LAUNCHED

_store: Any = None  # of the messages of patches
_without_data: Any = None  # the forms of operators that PyTorch lacks


def variables(processes: int, divided: bool = False) -> dict[str, str]:
    """Return the environment variables of the first process; none for a single one.

    ``divided``: whether DeepSpeed would divide its state, which needs no communication here (:mod:`zero_run`).
    """
    if divided:
        return {LAUNCHED: "1"}
    if processes == 1:
        return {}
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        LAUNCHED: "1",
    }


def pretend(processes: int) -> None:
    """Let this process be the first of several for the rest of its life."""
    import torch
    import torch.nn.parallel.distributed as parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from kohya_ext.dry_run.device import creating_on_gpu

    _complete_operators()
    torch.distributed.init_process_group(backend="fake", rank=0, world_size=processes, store=FakeStore())
    global _store
    _store = torch.distributed.TCPStore("127.0.0.1", 0, None, True)
    os.environ["MASTER_PORT"] = str(_store.port)
    # DistributedDataParallel compares the shapes of all processes, and reduces with a future that has no result here.
    parallel._verify_param_shape_across_processes = lambda *_, **__: None
    create, make_buckets = parallel.DistributedDataParallel.__init__, parallel.DistributedDataParallel._ddp_init_helper

    def make_buckets_on_gpu(*args: Any, **kwargs: Any) -> Any:
        with creating_on_gpu():
            return make_buckets(*args, **kwargs)

    def create_and_hook(self: Any, *args: Any, **kwargs: Any) -> None:
        # With it, the buckets are not planned again after the first step, from numbers that come back as zeros.
        create(self, *args, **{**kwargs, "find_unused_parameters": True})
        self.register_comm_hook(None, lambda _, bucket: bucket_as_future(bucket))  # PyTorch checks annotations

    parallel.DistributedDataParallel.__init__ = create_and_hook
    parallel.DistributedDataParallel._ddp_init_helper = make_buckets_on_gpu
    # The state of random numbers that the processes share would come back as zeros.
    setattr(importlib.import_module("accelerate.utils.random"), "synchronize_rng_state", _ignore)  # noqa: B010


def _complete_operators() -> None:
    """Give the communication its form for tensors without data, which PyTorch 2.6 lacks."""
    import torch

    global _without_data
    _without_data = torch.library.Library("c10d", "IMPL")
    for operator, result in (("barrier", _done), ("broadcast_", _unchanged), ("allreduce_", _unchanged)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{operator}", "Meta"):
            _without_data.impl(operator, result, "Meta")


def _unchanged(tensors: list[Any], *_: Any) -> tuple[list[Any], Any]:
    return tensors, _done()


def _done(*_: Any) -> Any:
    from torch._C._distributed_c10d import _create_work_from_future
    from torch.futures import Future

    future: Any = Future()
    future.set_result([])
    return _create_work_from_future(future).boxed()


def bucket_as_future(bucket: Any) -> Any:
    """Return a bucket of gradients as if it were reduced."""
    from torch.futures import Future

    future: Any = Future()
    future.set_result(bucket.buffer())
    return future


def _ignore(*_: Any, **__: Any) -> None: ...
