"""Measures the memory of a step: on the GPU from the allocator, on the CPU from the tensors."""

from __future__ import annotations

import gc
from typing import Any, Protocol

import torch

from kohya_ext.dry_run.tracker import Allocations
from kohya_ext.gpu import peak_memory
from kohya_ext.units import index_of


class MemoryMeter(Protocol):
    """Measures the memory of this process in bytes."""

    def begin(self) -> int:
        """Begin to measure; return the bytes in use."""

    def end(self) -> int:
        """Return the peak in bytes since :meth:`begin`."""

    def release(self) -> None:
        """Free unused memory."""


class GPUMemoryMeter:
    """Measures the reserved memory of a CUDA device's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = index_of(device)

    def begin(self) -> int:
        """Release memory of earlier phases (caching latents reserves gigabytes), so that the peak is the step's own."""
        self.release()
        peak_memory.reset(self.device)
        return int(torch.cuda.memory_reserved(self.device))

    def end(self) -> int:
        """Return the peak of reserved bytes since :meth:`begin`."""
        return int(torch.cuda.max_memory_reserved(self.device))

    def release(self) -> None:
        """Free tensors in reference cycles, and return unused cached memory to the driver."""
        gc.collect()
        torch.cuda.empty_cache()


class TemporaryMemoryMeter:
    """Measures the temporary tensors of a CUDA device. It neither waits for the device nor releases memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = index_of(device) if device.type == "cuda" else None

    def begin(self) -> None:
        """Begin to measure."""
        if self.device is not None:
            peak_memory.reset(self.device)

    def end(self) -> int:
        """Return the bytes of tensors at their peak since :meth:`begin`, beyond those that are left; 0 on a CPU."""
        if self.device is None:
            return 0
        return int(torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device))


class HostMemoryMeter:
    """Measures tensors in host memory: all storages alive, plus the peak of a step's allocations."""

    def __init__(self) -> None:
        self._step: Allocations | None = None
        self._before = 0

    def begin(self) -> int:
        """Add up all tensors alive, and begin to count allocations in this thread."""
        self.release()
        self._before = sum(storage.nbytes() for storage in _storages())
        self._step = Allocations()
        self._step.__enter__()
        return self._before

    def end(self) -> int:
        """Return the peak in bytes since :meth:`begin`; tensors alive at that time count until the end."""
        assert self._step is not None, "end without begin"
        self._step.__exit__(None, None, None)
        peak, self._step = self._before + self._step.peak, None
        return peak

    def release(self) -> None:
        """Free tensors in reference cycles."""
        gc.collect()


def _storages() -> list[Any]:
    # Not isinstance: it reads ``__class__``, which makes lazily imported modules load.
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None]
    return list({id(storage): storage for storage in map(_storage, tensors) if storage is not None}.values())


def _storage(tensor: torch.Tensor) -> Any:
    """Return a tensor's storage on the host; None for other devices and for tensors without storage, such as sparse ones."""
    if not torch._C._has_storage(tensor):
        return None
    storage = tensor.untyped_storage()
    return storage if storage.device.type == "cpu" else None
