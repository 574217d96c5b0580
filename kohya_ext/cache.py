"""The folder for files that the extension can create again."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def folder() -> Path:
    """Return the cache's folder: ``KOHYA_EXT_CACHE``, or the user's own cache."""
    return Path(os.environ.get("KOHYA_EXT_CACHE") or user_cache_path("kohya_ext", appauthor=False))
