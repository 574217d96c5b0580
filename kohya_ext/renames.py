"""Rename, replace, remove and read files that other programs may have open.

On Windows this fails while a program has the file open: Explorer, search, virus scanners and backup programs for a moment,
ComfyUI with a model for as long as it is loaded. So each operation is repeated for :data:`PATIENCE` seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

R = TypeVar("R")

PATIENCE = 5.0
"""Seconds to wait for other programs to close a file."""

_PAUSE = 0.05
"""Seconds between two attempts."""

_OPEN = {5, 32, 33, 1224}
"""Errors of Windows for a file that is open: access denied, sharing and lock violations, and a mapped file."""


def is_open(error: OSError) -> bool:
    """Return whether an operation has failed because a file is open; only on Windows."""
    number = getattr(error, "winerror", None)
    # The function `open` gives no error number of Windows.
    return number in _OPEN or (number is None and os.name == "nt" and isinstance(error, PermissionError))


def rename(source: Path, target: Path) -> None:
    """Rename a file or a folder; a file replaces an earlier one. Raises OSError."""
    patiently(lambda: os.replace(source, target))


def replace_text(file: Path, text: str) -> None:
    """Write a small file and its folder; other processes read the old text or the new one, never a part. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        rename(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def unlink(file: Path) -> None:
    """Remove a file if it exists. Raises OSError."""
    patiently(lambda: file.unlink(missing_ok=True))


def patiently(operation: Callable[[], R]) -> R:
    """Repeat an operation while a file is open; return its result. Raises OSError."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return operation()
        except OSError as error:
            if not is_open(error) or time.monotonic() >= until:
                raise
        time.sleep(_PAUSE)
