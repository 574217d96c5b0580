"""Sizes of memory on the command line: GPUs by the size they are sold as, budgets in bytes."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

GB, GIB = 10**9, 2**30

#: What ``--vram_budget`` says for the card's free memory less a margin.
AUTO = "auto"

#: No GPU is sold with more GB. A larger number without a unit counts bytes, if it is at least :data:`LEAST_BYTES`.
MOST_SOLD, LEAST_BYTES = 1024, 2**28

_UNITS = {"mb": 10**6, "mib": 2**20, "gb": GB, "gib": GIB}


def read_budget(value: object) -> int | str:
    """Return a budget in bytes, or :data:`AUTO`: ``14GB`` is 14e9 bytes, ``13GiB`` 13 * 2**30.

    Unlike :func:`read_card`, for which 14GB is a GPU with 14 GiB. Raises ValueError for anything else, a bare number too.
    """
    text = str(value).strip().lower()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(mb|mib|gb|gib)", text)
    if text == AUTO:
        return AUTO
    if match is None or float(match.group(1)) == 0:
        raise ValueError(f"must be a size with its unit, 14GB (14e9 bytes) or 13GiB (13 * 2**30), or auto, not {value!r}")
    return round(float(match.group(1)) * _UNITS[match.group(2)])


def read_card(value: object) -> int:
    """Return the bytes of a GPU's memory: ``12``, ``12gb``, ``12GB`` and ``12 GB`` are a GPU sold as 12 GB, which has 12 GiB.

    ``11.5GiB`` and ``11776MiB`` (as nvidia-smi prints it) are exact, and so is a number of bytes. Raises ValueError for
    anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|gb|gib|mib)?", str(value).strip().lower())
    number, unit = (float(match.group(1)), match.group(2)) if match is not None else (0.0, None)
    if unit is None and number >= LEAST_BYTES:
        return round(number)
    size = round(number * (2**20 if unit == "mib" else GIB))
    if LEAST_BYTES <= size <= MOST_SOLD * GIB:
        return size
    raise ValueError(f"must be the size that the GPU is sold as, for example 12 or 12GB, or an exact 11.5GiB, not {value!r}")


def label(size: int) -> str:
    """Return a GPU's memory for messages: ``12 GB GPU (12.88e9 bytes)``, or ``11.50 GiB GPU (12.35e9 bytes)``.

    A whole number of GiB is the size that a GPU is sold as, in GB.
    """
    sold = f"{size // GIB} GB" if size % GIB == 0 else f"{size / GIB:.2f} GiB"
    return f"{sold} GPU ({size / GB:.2f}e9 bytes)"


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
