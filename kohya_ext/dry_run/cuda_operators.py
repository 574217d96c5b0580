"""Operators and functions that run on a GPU as others do on the host, or allocate otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kohya_ext.dry_run.tracker import Tracker
from kohya_ext.patching.attributes import replaced


@contextmanager
def bias_in_place() -> Iterator[None]:
    """Let linear layers add their bias in place inside the block, which PyTorch does not do under a dispatch mode.

    Source: aten/src/ATen/native/Linear.cpp.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("linear", _linear, "CompositeImplicitAutograd")
        yield
    finally:
        library._destroy()


def _linear(values: Any, weight: Any, bias: Any = None) -> Any:
    if bias is None:
        return torch.matmul(values, weight.t())
    if values.dim() == 2:
        return torch.addmm(bias, values, weight.t())
    if values.is_contiguous():
        return torch.addmm(bias, values.reshape(-1, values.shape[-1]), weight.t()).view(*values.shape[:-1], weight.shape[0])
    return torch.matmul(values, weight.t()).add_(bias)


@contextmanager
def bitsandbytes_without_kernels(tracker: Tracker) -> Iterator[None]:
    """Count bitsandbytes' kernels and waits instead of running them: they cannot take fake tensors, and allocate nothing.

    The managed memory of its paged optimizers is the host's, as long as the GPU has none to spare.
    """

    def count(*args: Any, **kwargs: Any) -> None:
        tracker.work.kernel(args, kwargs, launcher=tracker.launcher)

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype, device="cpu")
        values.is_paged, values.page_deviceid = True, getattr(device, "index", 0)
        return values

    try:
        functional = importlib.import_module("bitsandbytes.functional")
        optimizers = importlib.import_module("bitsandbytes.optim.optimizer")
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit", "fill"):
            stack.enter_context(replaced(functional, name, count))
        stack.enter_context(replaced(functional, "get_paged", paged))
        stack.enter_context(replaced(functional, "prefetch_tensor", lambda *_, **__: None))
        stack.enter_context(replaced(optimizers, "sync_gpu", lambda _: tracker.work.wait()))
        yield


@contextmanager
def functions_as_on_cuda() -> Iterator[None]:
    """Clip gradients with kernels over lists of tensors, and drop values with a mask of one byte each, as on a GPU."""
    functional = torch.nn.functional
    drop = functional.dropout

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        if not training or inplace or not 0 < p < 1:
            return drop(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    clipping = importlib.import_module("torch.nn.utils.clip_grad")
    with replaced(clipping, "_has_foreach_support", lambda *_: True), replaced(functional, "dropout", dropout):
        yield
