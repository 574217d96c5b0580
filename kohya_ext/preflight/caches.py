"""Cached latents and text encoder outputs beside the images: the ``.npz`` files of ``--cache_latents_to_disk`` and its like."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kohya_ext.preflight import shortened

_OPTIONS = ("cache_latents_to_disk", "cache_text_encoder_outputs_to_disk", "in_json", "metadata_file")


def are_read(options: Mapping[str, Any]) -> bool:
    """Return whether a run with these options would read such files."""
    return any(options.get(name) for name in _OPTIONS)


def problems(folder: Path, stems: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the files that belong to the images of a folder, whose names without suffix are ``stems``.

    Only the end of a file is read, where a whole one has its table of contents.
    """
    broken = sorted(file.name for file in folder.glob("*.npz") if _belongs(file.stem, stems) and not zipfile.is_zipfile(file))
    if broken:
        yield (f"{folder}: caches that are empty, truncated or not .npz: {shortened(broken)}. Delete them; they are made again")


def _belongs(name: str, stems: Collection[str]) -> bool:
    """Whether a cache's name is an image's, with or without something behind an underscore."""
    parts = name.split("_")
    return any("_".join(parts[:count]) in stems for count in range(1, len(parts) + 1))
