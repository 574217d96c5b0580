"""Check cached latents and text encoder outputs: the ``.npz`` files that options such as ``--cache_latents_to_disk`` write."""

from __future__ import annotations

import bisect
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.preflight import abbreviated
from kohya_ext.preflight.output import try_to_write

#: Options of upstream's caching, which ends with an error for a damaged file; ours creates the file again.
_CREATED = ("cache_latents_to_disk", "cache_text_encoder_outputs_to_disk")

#: Options of datasets that may consist of caches without images.
_GIVEN = ("in_json", "metadata_file")


def are_read(options: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether a run with these options reads cache files and fails when one is damaged."""
    return any(options.get(name) for name in (*_GIVEN, *(_CREATED if settings["caching_workers"] == 0 else ())))


def are_written(options: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether a run with these options writes cache files, and an index, to the folders of its images."""
    return any(options.get(name) for name in _CREATED) and settings["caching_workers"] != 0


def unwritable(folder: Path, images: Sequence[Path], options: Mapping[str, Any]) -> str | None:
    """Return a message if a run writes caches to a folder where it may not, and some image has none yet."""
    if not any(options.get(name) for name in _CREATED):
        return None
    try:
        try_to_write(folder)
    except OSError as error:
        present = sorted(name for name in os.listdir(folder) if name.endswith((".npz", ".safetensors")))
        after = [bisect.bisect(present, image.stem) for image in images]
        if all(at < len(present) and present[at].startswith(image.stem) for at, image in zip(after, images, strict=True)):
            return None
        wanted = " and ".join(f"--{name}" for name in _CREATED if options.get(name))
        return f"{wanted}: {folder} cannot be written to: {error.strerror or error}; allow it, or copy the images elsewhere"
    return None


def problems(folder: Path, stems: Collection[str]) -> Iterator[str]:
    """Yield one message about the damaged cache files of images in a folder, whose names without suffix are ``stems``.

    Reads only the end of each file, where a complete one has its zip directory.
    """
    broken = sorted(file.name for file in folder.glob("*.npz") if _belongs(file.stem, stems) and not zipfile.is_zipfile(file))
    if broken:
        yield (f"{folder}: empty or damaged caches: {abbreviated(broken)}. Delete them; sd-scripts will recreate them")


def _belongs(name: str, stems: Collection[str]) -> bool:
    """Return whether a cache's name is an image's, optionally followed by an underscore and more."""
    parts = name.split("_")
    return any("_".join(parts[:count]) in stems for count in range(1, len(parts) + 1))
