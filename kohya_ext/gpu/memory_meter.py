"""How much memory a step takes: the one place where it is read, from the card, or without one from the tensors themselves."""

from __future__ import annotations

import gc
from typing import Any, Protocol

import torch

from kohya_ext.estimate.tracker import Allocations
from kohya_ext.units import index_of


class MemoryMeter(Protocol):
    """Reads memory in bytes, of this process."""

    def begin(self) -> int:
        """Begin to measure; return what is held now."""

    def end(self) -> int:
        """Return the most that was held since then."""

    def release(self) -> None:
        """Give back what is held for nothing."""


class GPUMemoryMeter:
    """What the caching allocator of a CUDA device has reserved."""

    def __init__(self, device: torch.device) -> None:
        self.device = index_of(device)

    def begin(self) -> int:
        """Give back what earlier phases left (the VAE's caching reserves gigabytes), so that the peak is the step's own."""
        self.release()
        torch.cuda.reset_peak_memory_stats(self.device)
        return int(torch.cuda.memory_reserved(self.device))

    def end(self) -> int:
        """Return the most that was reserved since :meth:`begin`."""
        return int(torch.cuda.max_memory_reserved(self.device))

    def release(self) -> None:
        """Free what only reference cycles hold, and return cached memory in which nothing lies to the driver."""
        gc.collect()
        torch.cuda.empty_cache()


class HostMemoryMeter:
    """What tensors hold where there is no card: every storage alive, and what a step adds to them at most."""

    def __init__(self) -> None:
        self._step: Allocations | None = None
        self._before = 0

    def begin(self) -> int:
        """Weigh every tensor that is alive, and begin to weigh what is allocated in this thread."""
        self.release()
        self._before = sum(storage.nbytes() for storage in _storages())
        self._step = Allocations()
        self._step.__enter__()
        return self._before

    def end(self) -> int:
        """Return the most bytes alive since :meth:`begin`; what was alive then counts to the end."""
        assert self._step is not None, "end without begin"
        self._step.__exit__(None, None, None)
        peak, self._step = self._before + self._step.peak, None
        return peak

    def release(self) -> None:
        """Free what only reference cycles hold."""
        gc.collect()


def _storages() -> list[Any]:
    # The type is asked, not the object: modules that import lazily load themselves when they are asked for their class.
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None]
    return list({id(storage): storage for storage in map(_storage, tensors) if storage is not None}.values())


def _storage(tensor: torch.Tensor) -> Any:
    """A tensor's storage on the host; None for one that has none of its own, as a sparse one, or none at all, as a meta one."""
    if not torch._C._has_storage(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage if storage.device.type == "cpu" else None
