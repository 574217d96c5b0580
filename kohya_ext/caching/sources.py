"""Identify of which image, or which caption and text encoders, a cache file was made.

Upstream looks for the names of a file's arrays alone, so it trains on the text encoder outputs of a caption that was edited
since, or of another checkpoint's text encoders. The index of a folder remembers the source of each file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kohya_ext.run import run_record
from kohya_ext.run.file_index import check_id
from kohya_ext.sdscripts import families

OTHER = "the image, the caption or the text encoders have changed"
"""Why a file is not that of its source."""

_PARTS = 64
"""Parts of a checkpoint that are read to identify it."""

_PART_BYTES = 256


def of_images(paths: Iterable[str]) -> dict[str, str]:
    """Return path -> the source of its latents: size and time of the image. Lists each folder once; leaves out missing ones."""
    wanted = {*paths}
    sources: dict[str, str] = {}
    for folder in {os.path.dirname(path) for path in wanted}:
        try:
            with os.scandir(folder or ".") as entries:
                stats = [(os.path.join(folder, entry.name), entry.stat()) for entry in entries if entry.is_file()]
        except OSError:
            continue
        sources |= {path: _source(stat.st_size, stat.st_mtime_ns) for path, stat in stats if path in wanted}
    return sources


def of_texts(images: Iterable[Any], tokenizer: Any) -> dict[str, str]:
    """Return path of an image -> the source of its text encoder outputs: caption, limits of tokens, and text encoders.

    ``tokenizer``: upstream's strategy, whose numbers are the limits.
    """
    limits = sorted((name, value) for name, value in vars(tokenizer).items() if isinstance(value, int)) if tokenizer else []
    encoders = _text_encoders()
    return {info.absolute_path: _source(info.caption, limits, encoders) for info in images}


def _text_encoders() -> str:
    """Return the identity of the run's checkpoint if the text encoders are in it. Others hardly differ between checkpoints."""
    run = run_record.current()
    family = families.of(run.script, run.identity) if run is not None else None
    if run is None or family is None or family.files:
        return ""
    return identity(Path(run.identity.get("pretrained_model_name_or_path", "")))


def identity(file: Path) -> str:
    """Return a name for a checkpoint's content from parts of it, spread over the file; empty for a folder or no file."""
    try:
        size = file.stat().st_size if file.is_file() else 0
        if not size:
            return ""
        with file.open("rb") as stream:
            parts = []
            for index in range(_PARTS):
                stream.seek(index * size // _PARTS)
                parts.append(stream.read(_PART_BYTES))
    except OSError:
        return ""
    return check_id(size, parts)


def older_than_captions(captions: Mapping[str, str]) -> set[str]:
    """Return the cache files that were last changed before their captions, from ``captions``: cache file -> caption's."""
    older = set()
    for cache, caption in captions.items():
        with contextlib.suppress(OSError):  # either is missing
            if os.stat(cache).st_mtime < os.stat(caption).st_mtime:
                older.add(cache)
    return older


def _source(*parts: object) -> str:
    return f"source:{check_id(*parts)}"


def recorded(passed: Iterable[str]) -> set[str]:
    """Return the sources among the entries that the index has for a file."""
    return {entry for entry in passed if entry.startswith("source:")}


def by_cache(sources: Mapping[str, str], paths: Mapping[str, str]) -> dict[str, str]:
    """Return path of a cache file -> its source, from ``paths``: image -> cache file."""
    return {cache: sources[image] for image, cache in paths.items() if image in sources}
