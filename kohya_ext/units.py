"""Memory sizes on the command line: GPUs by their advertised size, budgets in bytes."""

from __future__ import annotations

import re
from typing import Any

GB, GIB = 10**9, 2**30

#: The value of ``--vram_budget`` for the GPU's free memory less a margin.
AUTO = "auto"

#: Smallest fraction of its advertised size that the driver reports for a GPU: 24,564 MiB of an RTX 4090, 15,360 of a T4.
SMALLEST_SHARE = 0.93

#: Limits of a GPU's size in GB and in bytes. A number without a unit is in bytes from :data:`MIN_BYTES` on.
MAX_GB, MIN_BYTES = 1024, 2**28

_UNITS = {"mb": 10**6, "mib": 2**20, "gb": GB, "gib": GIB}


def read_budget(value: object) -> int | str:
    """Return a budget in bytes, or :data:`AUTO`: ``14GB`` is 14e9 bytes, ``13GiB`` 13 * 2**30.

    Unlike in :func:`read_card`, where 14GB is a GPU with 14 GiB. Raises ValueError for anything else, also without a unit.
    """
    if str(value).strip().lower() == AUTO:
        return AUTO
    size = _size(value)
    if size is None:
        raise ValueError(f"must be a size with its unit, 14GB (14e9 bytes) or 13GiB (13 * 2**30), or auto, not {value!r}")
    return size


def read_size(value: object) -> int:
    """Return a size in bytes: ``20GB`` is 20e9 bytes, ``20GiB`` 20 * 2**30. Raises ValueError for anything else."""
    size = _size(value)
    if size is None:
        raise ValueError(f"must be a size with its unit, 20GB (20e9 bytes) or 20GiB (20 * 2**30), not {value!r}")
    return size


def _size(value: object) -> int | None:
    """Return the bytes of a size with its unit; None for 0 and anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(mb|mib|gb|gib)", str(value).strip().lower())
    return round(float(match.group(1)) * _UNITS[match.group(2)]) or None if match is not None else None


def read_card(value: object) -> int:
    """Return the bytes of a GPU: ``12``, ``12gb``, ``12GB`` and ``12 GB`` mean a GPU advertised as 12 GB, which has 12 GiB.

    ``11.5GiB`` and ``11776MiB`` (as nvidia-smi prints it) are exact, and so is a number of bytes. Raises ValueError for
    anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(g|gb|gib|mib)?", str(value).strip().lower())
    number, unit = (float(match.group(1)), match.group(2)) if match is not None else (0.0, None)
    if unit is None and number >= MIN_BYTES:
        return round(number)
    size = round(number * (2**20 if unit == "mib" else GIB))
    if MIN_BYTES <= size <= MAX_GB * GIB:
        return size
    raise ValueError(f"must be the advertised size of the GPU, for example 12 or 12GB, or an exact 11.5GiB, not {value!r}")


def label(size: int) -> str:
    """Return a GPU's size for messages: ``12 GB GPU (12.88e9 bytes)``, or ``11.50 GiB GPU (12.35e9 bytes)``.

    A whole number of GiB is printed as the advertised GB of the GPU.
    """
    sold = f"{size // GIB} GB" if size % GIB == 0 else f"{size / GIB:.2f} GiB"
    return f"{sold} GPU ({size / GB:.2f}e9 bytes)"


def has_gpu() -> bool:
    """Return whether PyTorch can use a GPU of any kind. Imports torch."""
    import torch

    kinds = (torch.cuda, getattr(torch, "xpu", None), torch.backends.mps, getattr(torch, "npu", None))
    return any(kind is not None and kind.is_available() for kind in kinds)


def index_of(device: Any) -> int:
    """Return the index of a CUDA device; accelerate leaves it out for a single GPU, but some functions of torch need it."""
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)


def format_size(size: float) -> str:
    """Return a size with its unit: GB (1e9 bytes) with two decimals, below 0.1 GB in MB (1e6) with one."""
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 10**6:.1f} MB"


def gigabytes(size: float) -> str:
    """Return a size in GB (1e9 bytes) with two decimals."""
    return f"{size / GB:.2f}"
