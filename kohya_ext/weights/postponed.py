"""Weights on the host whose casts are computed when the weights are moved or read, not before.

A checkpoint that is mapped costs no memory of the process until its tensors are changed. A cast on the host is such a change:
it copies every weight. So do the scales of weights that a file stores in 8 bits. :class:`PostponedCast` keeps the tensor of the
file, its scales and the list of casts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from mmap import mmap
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from kohya_ext.weights.scaling import DTYPE, Scaling

_aten = torch.ops.aten


@dataclass
class History:
    """A tensor of a file on the host, its scales, and the precisions to which it is then cast in this order."""

    source: torch.Tensor
    casts: tuple[torch.dtype, ...] = ()
    scaling: Scaling | None = None
    """What makes weights of the source's values; None if they are the weights."""
    is_read: bool = False
    """Whether an operation has read or changed the values; they are then in :attr:`source`, instead of the file's."""

    def cast(self, dtype: torch.dtype) -> History:
        """Return the history with one more cast.

        float32 holds all values of the shorter types, so that a cast through it gives what a direct one does.
        """
        casts = self.casts[:-1] if self.dtype == torch.float32 else self.casts
        shorter = replace(self, casts=casts)
        return shorter if dtype == shorter.dtype else replace(self, casts=(*casts, dtype))

    @property
    def dtype(self) -> torch.dtype:
        """The precision after all casts."""
        if self.casts:
            return self.casts[-1]
        return self.source.dtype if self.scaling is None else DTYPE

    def value(self) -> torch.Tensor:
        """Return the tensor after all casts: of the source's shape, on the host."""
        value = self.source if self.scaling is None else self.scaling.weights(self.source)
        for dtype in self.casts:
            value = _in_own_pages(value, dtype) if value.device.type == "cpu" else value.to(dtype)
        return value

    def copy_to(self, device: torch.device, **options: Any) -> torch.Tensor:
        """Return the tensor after all casts on another device. Eight bits are moved first, and computed there."""
        if self.scaling is None:
            return _aten._to_copy.default(self.value(), device=device, **options)
        return replace(self, source=self.source.to(device)).value()

    def identity(self, rows: Sequence[int]) -> tuple[object, ...]:
        """Return what the values of some rows are made of: bytes, scales and casts. Equal identities mean equal values."""
        scaling = None if self.scaling is None else (_bytes(self.scaling.scales), self.scaling.rotation)
        return self.source.dtype, scaling, self.casts, *(_bytes(self.source[row]) for row in rows)

    def read(self) -> torch.Tensor:
        """Return the tensor after all casts, and keep it in place of the file's, so that it can be changed."""
        # A file's tensor without casts is read where it is. Its pages are private: a change does not reach the file.
        self.source, self.casts, self.scaling, self.is_read = self.value(), (), None, True
        return self.source


def history_of(tensor: torch.Tensor) -> History:
    """Return what a tensor is made of: a new history of an ordinary one."""
    return tensor.history if isinstance(tensor, PostponedCast) else History(tensor)


def stored_rows(tensor: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values of a matrix as int8 and the fp32 scales of its rows, if its file has them in the 8-bit format ``kind``.

    None if it has not, or if the matrix was changed. Casts are left out: they are what the 8-bit values replace.
    """
    history = history_of(tensor)
    if history.scaling is None or history.source.dtype != kind:
        return None
    scales = history.scaling.row_scales(history.source)
    return None if scales is None else (history.source.view(torch.int8), scales)


def _bytes(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return content


def _in_own_pages(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a cast copy whose memory goes back to the system when it is freed.

    glibc keeps freed blocks of up to 32 MiB. With FLUX, 2.4 GB of them were left between smaller ones in use.
    """
    size = tensor.numel() * dtype.itemsize
    pages = torch.frombuffer(mmap(-1, max(size, 1)), dtype=torch.uint8)
    return pages[:size].view(dtype).view(tensor.shape).copy_(tensor)


class PostponedCast(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """A tensor on the host with the shape and precision of its :class:`History`, which is computed at its first use.

    A cast on the host makes another postponed tensor. A move to another device computes the casts and keeps nothing of them.
    Any other operation computes them for good and continues with an ordinary tensor.
    """

    history: History

    @staticmethod
    def __new__(cls, history: History) -> PostponedCast:  # noqa: D102
        source = history.source
        tensor: PostponedCast = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride(), dtype=history.dtype, device=source.device
        )
        tensor.history = history
        return tensor

    def __repr__(self) -> str:
        return f"PostponedCast({self.history!r})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function. Modules must replace their parameter when it moves, instead of changing its data in place."""
        if function is torch._has_compatible_shallow_copy_type:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(keywords or {}))

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute the operator on the values; postpone casts, and share the history with detached tensors."""
        keywords = keywords or {}
        if operator is _aten.detach.default:
            return cls(arguments[0].history)
        if operator is _aten._to_copy.default:
            history = arguments[0].history
            history = history.cast(keywords.get("dtype") or history.dtype)
            is_move = keywords.get("device") not in (None, history.source.device)
            return history.copy_to(**keywords) if is_move else cls(history)
        arguments, keywords = tree_map_only(cls, lambda tensor: tensor.history.read(), (arguments, keywords))
        return operator(*arguments, **keywords)
