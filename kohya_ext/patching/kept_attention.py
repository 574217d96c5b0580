"""Results of attention that a checkpointed block keeps, so that its recomputation does not compute them again.

Checkpointing keeps a block's inputs alone. Attention is the one operation whose result is small and whose computation is not:
per byte kept, it saves several times as much time as leaving a block of FLUX out of checkpointing. The forward pass of a block
puts the results of its attention into a :class:`Store`, and its recomputation takes them from there.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten

#: The choices of ``torch._fused_sdp_choice`` that are supported: not the unfused one, and not cuDNN's.
_FLASH, _EFFICIENT = 1, 2

#: Heads of other widths are padded for flash attention.
_FLASH_MULTIPLE = 8

_of_thread = threading.local()  # autograd recomputes in a thread of its own


class Store:
    """The results of one call of a block, in order; each is given away once."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.taken: int | None = None
        """The number of results that a recomputation has taken; None in forward."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Keep the results of attention inside the block."""
        with self._as_current(None):
            yield

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Take the results of attention inside the block, the recomputation. A second recomputation computes them."""
        with self._as_current(0):
            yield

    @contextmanager
    def _as_current(self, taken: int | None) -> Iterator[None]:
        outer, _of_thread.store, self.taken = current(), self, taken
        try:
            yield
        finally:
            _of_thread.store = outer

    def result(self, kernel: Kernel, *inputs: Any) -> Any:
        """Return what ``kernel.forward`` returns for the inputs: kept, if the forward pass used the same kernel, or computed.

        PyTorch may choose another kernel for a pass with gradients.
        """
        if self.taken is None:
            result = kernel.forward(*inputs)
            kept = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in result)
            self.results.append((kernel, kept))
            return result
        number, self.taken = self.taken, self.taken + 1
        if number >= len(self.results) or self.results[number][0] is not kernel:
            return kernel.forward(*inputs)
        result, self.results[number] = self.results[number][1], (None, None)
        return result

    def pass_over(self) -> None:
        """Count attention that no kernel here computes, so that all others have the same number in both passes."""
        if self.taken is None:
            self.results.append((None, None))
        else:
            self.taken += 1


def current() -> Store | None:
    """Return the store of the checkpointed block that this thread runs."""
    return getattr(_of_thread, "store", None)


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention without a mask: ``forward(q, k, v, is_causal, scale)`` returns its result first."""

    forward: Callable[..., Sequence[Any]]
    backward: Callable[..., Sequence[Any]]
    """``backward(gradient, q, k, v, what forward returned, is_causal, scale)`` returns the gradients of q, k and v."""


def _on_cpu(q: Any, k: Any, v: Any, is_causal: bool, scale: float | None) -> Any:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)


def _on_cpu_backward(gradient: Any, q: Any, k: Any, v: Any, result: Any, is_causal: bool, scale: float | None) -> Any:
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, q, k, v, *result, 0.0, is_causal, scale=scale)


def _flash(q: Any, k: Any, v: Any, is_causal: bool, scale: float | None) -> Any:
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:8]  # without the debug mask


def _flash_backward(gradient: Any, q: Any, k: Any, v: Any, result: Any, is_causal: bool, scale: float | None) -> Any:
    *before, seed, offset = result
    backward = _aten._scaled_dot_product_flash_attention_backward
    return backward(gradient, q, k, v, *before, 0.0, is_causal, seed, offset, scale=scale)


def _efficient(q: Any, k: Any, v: Any, is_causal: bool, scale: float | None) -> Any:
    return _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)


def _efficient_backward(gradient: Any, q: Any, k: Any, v: Any, result: Any, is_causal: bool, scale: float | None) -> Any:
    backward, needed = _aten._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
    return backward(gradient, q, k, v, None, *result, 0.0, needed, is_causal, scale=scale)[:3]


ON_CPU = Kernel(_on_cpu, _on_cpu_backward)
FLASH = Kernel(_flash, _flash_backward)
EFFICIENT = Kernel(_efficient, _efficient_backward)


def kernel_of(q: Any, k: Any, v: Any, is_causal: bool, scale: float | None) -> Kernel | None:
    """Return the kernel that PyTorch chooses for attention without a mask; None for one that is not supported."""
    if q.device.type not in ("cuda", "cpu"):
        return None
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal, scale=scale)
    if q.device.type == "cpu":
        return ON_CPU if choice == _FLASH else None
    if choice == _FLASH:
        return FLASH if q.shape[-1] % _FLASH_MULTIPLE == 0 else None
    return EFFICIENT if choice == _EFFICIENT else None


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """PyTorch's attention and its gradient, bit for bit, with a result that may be kept."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, is_causal: bool, scale: float | None, kernel: Any, store: Store) -> Any:
        result = store.result(kernel, q, k, v, is_causal, scale)
        tensors = [value if isinstance(value, torch.Tensor) else None for value in result]
        ctx.save_for_backward(q, k, v, *tensors)
        ctx.others = [value if tensor is None else None for value, tensor in zip(result, tensors, strict=True)]
        ctx.arguments = kernel, is_causal, scale
        return result[0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        q, k, v, *tensors = ctx.saved_tensors
        result = [other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True)]
        kernel, is_causal, scale = ctx.arguments
        return (*kernel.backward(gradient, q, k, v, result, is_causal, scale), None, None, None, None)


def attention(
    original: Any, store: Store, counts: Counter[str], q: Any, k: Any, v: Any, is_causal: bool, scale: float | None
) -> Any:
    """Return ``original(q, k, v)``, PyTorch's attention without a mask, with its result kept in or taken from a store.

    That is counted in ``counts``; without a kernel here it is only returned.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (value.to(torch.get_autocast_dtype(device)) for value in (q, k, v))
    kernel = kernel_of(q, k, v, is_causal, scale) if q.dim() == 4 else None
    if kernel is None:
        store.pass_over()
        return original(q, k, v, is_causal=is_causal, scale=scale)
    counts["recorded" if store.taken is None else "kept"] += 1
    return _Attention.apply(q, k, v, is_causal, scale, kernel, store)
