"""Check cached latents and text encoder outputs: the ``.npz`` files that options such as ``--cache_latents_to_disk`` write."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kohya_ext.preflight import abbreviated

_OPTIONS = ("cache_latents_to_disk", "cache_text_encoder_outputs_to_disk", "in_json", "metadata_file")


def are_read(options: Mapping[str, Any]) -> bool:
    """Return whether a run with these options reads cache files."""
    return any(options.get(name) for name in _OPTIONS)


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
