"""Whether the Triton kernels of an 8-bit base are compiled already. Nothing here imports torch or Triton."""

from __future__ import annotations

import os
from pathlib import Path

#: A kernel that every 8-bit base runs.
_KERNEL = "_multiply"


def are_compiled() -> bool:
    """Return whether Triton's cache has a compiled product, of any size."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    return next(cache.glob(f"*/{_KERNEL}.json"), None) is not None
