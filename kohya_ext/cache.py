"""The folder for files that the extension can create again."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from platformdirs import user_cache_path

#: Folder in the cache -> what it contains.
PARTS: Mapping[str, str] = {
    "sd-scripts": "fetched checkouts of sd-scripts, and the list of registered ones",
    "compiled": "compiled kernels",
    "c": "compiled kernels",
    "cuda_graphs": "GPUs that failed to replay CUDA graphs",
    "estimates": "results of estimate and plan",
    "gpus": "measurements of calibrate",
    "images": "measurements of check --images",
    "self_tests": "results of the self-tests of GPUs",
    "speed": "what --speed has chosen for runs",
    "step_times": "seconds of earlier runs' steps",
    "tunes": "measurements of tune",
    "virtual_gpu": "the library of the virtual GPU",
    "windows": "the Windows Python of the tests",
}


def folder() -> Path:
    """Return the cache's folder: ``KOHYA_EXT_CACHE``, or the user's own cache."""
    return Path(os.environ.get("KOHYA_EXT_CACHE") or user_cache_path("kohya_ext", appauthor=False))


def parts() -> Iterator[tuple[Path, str]]:
    """Yield the folders that the extension has created in the cache, and what they contain."""
    return ((path, what) for name, what in PARTS.items() if (path := folder() / name).is_dir())


def size(path: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.lstat().st_size for file in _entries(path) if file.is_file())


def remove() -> None:
    """Remove the extension's folders, then the cache's folder if nothing else is in it. Raises OSError."""
    for path, _ in list(parts()):
        remove_tree(path)
    if folder().is_dir() and not any(folder().iterdir()):
        folder().rmdir()


def remove_tree(path: Path) -> None:
    """Remove a folder, also with files that Windows keeps because they are read-only, such as git's objects. Raises OSError."""
    for entry in _entries(path):
        if not entry.is_symlink() and not entry.stat().st_mode & stat.S_IWRITE:
            entry.chmod(stat.S_IREAD | stat.S_IWRITE)
    shutil.rmtree(path)


def _entries(path: Path) -> Iterator[Path]:
    return (Path(root) / name for root, _, files in os.walk(path) for name in files)
