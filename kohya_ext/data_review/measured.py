"""Measures of images that were looked at before, so that a second review takes seconds."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kohya_ext import cache
from kohya_ext.data_review.measures import Measures, measure
from kohya_ext.renames import replace_text

#: Increase it when a measure changes.
_VERSION = 1


class MeasuredImages:
    """The measures of a folder's images, kept in the user's cache by size, time of the last change and trained size."""

    def __init__(self, folder: Path) -> None:
        """Read the measures of earlier reviews; a damaged file has none."""
        name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._file = cache.folder() / "images" / f"{name}.json"
        self._kept: dict[str, dict[str, Any]] = {}
        self._used: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            document = json.loads(self._file.read_text(encoding="utf-8"))
            if document.get("version") == _VERSION:
                self._kept = dict(document["images"])

    def measure(self, file: Path, trained: tuple[int, int]) -> Measures:
        """Return the measures of an image at the size at which it is trained. Raises as :func:`measure` does."""
        stat = file.stat()
        key = f"{file.name}:{stat.st_size}:{stat.st_mtime_ns}:{trained[0]}x{trained[1]}"
        with contextlib.suppress(KeyError, TypeError, ValueError):
            kept = self._kept[key]
            measures = Measures(**{**kept, "corners": tuple(map(bytes.fromhex, kept["corners"]))})
            self._used[key] = kept
            return measures
        measures = measure(file, trained)
        self._used[key] = {**asdict(measures), "corners": [corner.hex() for corner in measures.corners]}
        return measures

    def keep(self) -> None:
        """Write the measures of this review. Without room for them the next one measures again."""
        with contextlib.suppress(OSError):
            replace_text(self._file, json.dumps({"version": _VERSION, "images": self._used}))
