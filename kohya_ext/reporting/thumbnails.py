"""Small copies of images as data URLs. Pillow is optional."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_QUALITY = 72

_LARGEST = 80_000_000
"""Number of pixels up to which an image is opened, against files that need much memory."""


@dataclass
class Thumbnails:
    """Thumbnails by file and edge, kept for the next report of a run that trains."""

    urls: dict[tuple[Path, int], tuple[int, str]] = field(default_factory=dict)
    """(file, edge) -> the file's modification time and the URL."""

    def add(self, files: Iterable[Path], edge: int) -> None:
        """Read images and keep copies of at most ``edge`` pixels per side. Does nothing without Pillow."""
        try:
            import PIL.Image  # noqa: F401
        except ImportError:
            return
        with ThreadPoolExecutor() as threads:  # Pillow decodes and scales without Python's lock
            for file, thumbnail in threads.map(lambda file: (file, self._read(file, edge)), files):
                if thumbnail is not None:
                    self.urls[file, edge] = thumbnail

    def get(self, file: Path, edge: int) -> str | None:
        """Return a thumbnail's URL; None if the image cannot be read."""
        return self.urls.get((file, edge), (0, None))[1]

    def _read(self, file: Path, edge: int) -> tuple[int, str] | None:
        from PIL import Image

        try:
            if not file.is_file():  # a pipe would block
                return None
            changed = file.stat().st_mtime_ns
            kept = self.urls.get((file, edge))
            if kept is not None and kept[0] == changed:
                return kept
            with Image.open(file) as image:
                if image.width * image.height > _LARGEST:
                    return None
                image.draft("RGB", (edge, edge))
                image.thumbnail((edge, edge))
                content = io.BytesIO()
                image.convert("RGB").save(content, "JPEG", quality=_QUALITY, optimize=True)
        except Exception:  # a damaged image raises errors of many types
            return None
        return changed, f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
