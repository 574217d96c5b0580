"""Measure the peak memory of this process."""

from __future__ import annotations

import sys

#: Device -> the most allocated and reserved bytes before the last :func:`reset`.
_earlier: dict[int, tuple[int, int]] = {}


def peak_memory() -> dict[str, int]:
    """Return this process's peaks in bytes: ``host_resident``; with CUDA in use ``cuda_allocated``, ``cuda_reserved``."""
    peak: dict[str, int] = {}
    try:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peak["host_resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    except ImportError:  # Windows
        import psutil

        peak["host_resident"] = psutil.Process().memory_info().peak_wset
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        peak["cuda_allocated"], peak["cuda_reserved"] = of_device(torch.cuda.current_device())
    return peak


def of_device(device: int) -> tuple[int, int]:
    """Return the most bytes that the caching allocator has allocated and reserved on a CUDA device since the process began."""
    import torch

    allocated, reserved = before_reset(device)
    return max(allocated, torch.cuda.max_memory_allocated(device)), max(reserved, torch.cuda.max_memory_reserved(device))


def before_reset(device: int) -> tuple[int, int]:
    """Return the most bytes allocated and reserved before the allocator's peaks were reset."""
    return _earlier.get(device, (0, 0))


def reset(device: int) -> None:
    """Let the allocator count its peaks from now on, while :func:`of_device` still knows the earlier ones."""
    import torch

    _earlier[device] = of_device(device)
    torch.cuda.reset_peak_memory_stats(device)
