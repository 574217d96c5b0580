"""The device of a measurement."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def describe_device() -> dict[str, Any]:
    """Return the GPU that accelerate would use, with CUDA and driver; or the CPU and torch's threads."""
    if os.environ.get("ACCELERATE_USE_CPU") or not torch.cuda.is_available():
        return {"device": "cpu", "threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(0)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "device": "cuda",
        "gpu": about.name,
        "gpu_memory": about.total_memory,
        "compute_capability": f"{about.major}.{about.minor}",
        "cuda": torch.version.cuda,
        "driver": driver.read_text(encoding="utf-8").splitlines()[0] if driver.is_file() else None,
    }
