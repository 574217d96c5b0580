"""Operators and functions that run on a GPU as others do on the host, or allocate otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kohya_ext.dry_run.device import in_compiled, is_on_gpu
from kohya_ext.dry_run.tracker import Tracker
from kohya_ext.patching.attributes import replaced

_aten = torch.ops.aten


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

    The managed memory of its paged optimizers does not count: the driver moves it to the host where the GPU is full.
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


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """PyTorch's RMS norm on a GPU: one kernel for each direction, on contiguous copies. Its values are of no use.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """

    @staticmethod
    def forward(ctx: Any, values: Any, weight: Any) -> Any:
        dense = values.contiguous()
        result = dense * (1 if weight is None else weight)
        ctx.save_for_backward(values, weight, values.new_empty((*values.shape[:-1], 1), dtype=torch.float32))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any]:
        values, weight, _ = ctx.saved_tensors
        of_values, of_weight = ctx.needs_input_grad
        dense = values.contiguous()
        result = torch.empty_like(dense).copy_(gradient.contiguous()) if of_values else None
        return result, torch.empty_like(weight) if of_weight else None


#: Since PyTorch 2.9 a GPU has kernels for RMS norm. For tensors that say "cpu" to C++ it is composed of several.
_HAS_RMS_NORM = hasattr(_aten, "_fused_rms_norm")


@contextmanager
def functions_as_on_cuda() -> Iterator[None]:
    """Clip gradients with kernels over lists of tensors, drop values with a mask of one byte each, and compute RMS norms in one
    kernel, as on a GPU.
    """
    functional = torch.nn.functional
    drop, norm = functional.dropout, functional.rms_norm

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
        if not training or inplace or not 0 < p < 1:
            return drop(input, p, training, inplace)
        return torch.native_dropout(input, p, training)[0]

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:  # noqa: A002
        has_kernel = _HAS_RMS_NORM and is_on_gpu(input) and (weight is None or weight.dtype is input.dtype)
        if not has_kernel or len(normalized_shape) > 1 or in_compiled() or torch.is_autocast_enabled("cuda"):
            return norm(input, normalized_shape, weight, eps)
        return _RmsNorm.apply(input, weight)

    clipping = importlib.import_module("torch.nn.utils.clip_grad")
    with (
        replaced(clipping, "_has_foreach_support", lambda *_: True),
        replaced(functional, "dropout", dropout),
        replaced(functional, "rms_norm", rms_norm),
    ):
        yield
