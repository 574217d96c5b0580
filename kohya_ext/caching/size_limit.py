"""Divide images between caches on disk, up to a limit on their size, and caches in host memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kohya_ext.caching.checks import LATENT_SIZES
from kohya_ext.run.file_index import SUFFIXES

_OVERHEAD = 2048
"""Upper bound of the bytes of a cache file's headers and small arrays."""


@dataclass
class Division:
    """Which images' caches are files, and which are in host memory."""

    disk: set[str] = field(default_factory=set)
    """Keys of images whose cache is a file, or becomes one."""
    memory: set[str] = field(default_factory=set)
    files: int = 0
    """Bytes of all files in the images' folders, including those that will be written."""
    memory_bytes: int = 0
    missing: int = 0
    """Bytes beyond the limit that files for all images would need."""


@dataclass(frozen=True)
class Cache:
    """The cache of one image."""

    key: str
    path: str
    """Its file on disk, which may not exist."""
    file_bytes: int
    """Upper bound of the file's size."""
    memory_bytes: int


def divide(caches: Sequence[Cache], limit: int) -> Division:
    """Return a division in which files, with all other caches in their folders, have at most ``limit`` bytes.

    Existing files are kept, also beyond the limit. The first images that have none get the rest of it.
    """
    folders = {os.path.dirname(cache.path) for cache in caches}
    sizes = {path: size for folder in folders for path, size in _files(folder)}
    division = Division(files=sum(sizes.values()))
    for cache in caches:
        if cache.path in sizes:
            division.disk.add(cache.key)
        elif division.files + cache.file_bytes <= limit:
            division.disk.add(cache.key)
            division.files += cache.file_bytes
        else:
            division.memory.add(cache.key)
            division.memory_bytes += cache.memory_bytes
            division.missing += cache.file_bytes
    if division.memory:
        division.missing += division.files - limit
    return division


def _files(folder: str) -> Iterable[tuple[str, int]]:
    with os.scandir(folder or ".") as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIXES):
                yield os.path.join(folder, entry.name), entry.stat().st_size


def latents_bytes(strategy: Any, bucket: tuple[int, int], flip: bool, mask: bool, width: int) -> int | None:
    """Return the bytes of an image's cached latents, of ``width`` bytes a value; None for an unknown strategy.

    ``bucket``: (width, height) in pixels.
    """
    known = LATENT_SIZES.get(type(strategy).__name__)
    if known is None:
        return None
    channels, side = known
    latents = channels * (bucket[0] // side) * (bucket[1] // side) * width
    return latents * (1 + flip) + bucket[0] * bucket[1] * 4 * mask + _OVERHEAD


def outputs_bytes(outputs: Iterable[Any], width: int) -> int:
    """Return the bytes of an image's text encoder outputs, with ``width`` bytes for each value of float32."""
    sizes = (int(array.nbytes) * width // 4 if str(array.dtype) == "float32" else int(array.nbytes) for array in outputs)
    return _OVERHEAD + sum(sizes)


def memory_copies(processes: int, workers: int, forks: bool) -> int:
    """Return how many copies of a cache the processes and data loader workers of this machine hold.

    A worker that is forked shares its pages with the process; another one gets a copy.
    """
    return processes * (1 if forks else 1 + workers)


def caches_of(
    images: Mapping[str, Any], path: Callable[[Any], str], size: Callable[[Any, int], int], width: int
) -> list[Cache]:
    """Return the caches of a dataset's images; ``size(image, bytes per value)`` returns the bytes of one."""
    return [Cache(key, path(info), size(info, width), size(info, 4)) for key, info in images.items()]
