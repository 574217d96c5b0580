"""Sizes of memory as people say them, and cards as they are sold."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

GB, GIB = 10**9, 2**30

#: What ``--vram_budget`` says for the card's free memory less a margin.
AUTO = "auto"

_UNITS = {"mb": 10**6, "mib": 2**20, "gb": GB, "gib": GIB}


def read_budget(value: object) -> int | str:
    """Return a budget in bytes, or :data:`AUTO`: ``14GB`` is 14e9 bytes, ``13GiB`` 13 * 2**30.

    Raises ValueError for anything else, a bare number too: 14 could be either.
    """
    text = str(value).strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(mb|mib|gb|gib)", text)
    if text == AUTO:
        return AUTO
    if match is None or float(match.group(1)) == 0:
        raise ValueError(f"must be a size with its unit, 14GB (14e9 bytes) or 13GiB (13 * 2**30), or auto, not {value!r}")
    return round(float(match.group(1)) * _UNITS[match.group(2)])


def read_size(value: object) -> int:
    """Return bytes: ``16GB`` is 16e9, ``16GiB`` is 16 * 2**30, and a plain ``16`` is a card sold as 16 GB, which has 16 GiB.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?", str(value).strip(), re.IGNORECASE)
    if match is None or float(match.group(1)) == 0:
        raise ValueError(f"must be 16GB (16e9 bytes), 16GiB (17.18e9), or 16 for a card sold as 16 GB (16 GiB), not {value!r}")
    unit = (match.group(2) or "").lower()
    return round(float(match.group(1)) * (GB if unit == "gb" else GIB))


def find() -> tuple[str, int] | None:
    """Return the name and the bytes of the first NVIDIA card that this process may use; None without one.

    Asks the driver's own tool: torch, which would take seconds, is not needed.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1"):
        return None
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", f"--id={visible}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        name, _, mebibytes = done.stdout.strip().rpartition(",")
        return name.strip(), int(mebibytes) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def index_of(device: Any) -> int:
    """Return the number of a CUDA device; accelerate names the only one without it, which not every function of torch takes."""
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)


def said(size: float) -> str:
    """Return a size with its unit: GB (1e9 bytes) with two decimals, small ones in MB (1e6) with one."""
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 10**6:.1f} MB"


def gigabytes(size: float) -> str:
    """Return a size in GB (1e9 bytes) with two decimals."""
    return f"{size / GB:.2f}"
