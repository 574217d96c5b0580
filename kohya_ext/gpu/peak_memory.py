"""Measure the peak memory of this process."""

from __future__ import annotations

import sys


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
        peak["cuda_allocated"] = torch.cuda.max_memory_allocated()
        peak["cuda_reserved"] = torch.cuda.max_memory_reserved()
    return peak
