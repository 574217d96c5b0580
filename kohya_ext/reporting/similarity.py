"""How similar samples are to the images of a run, by an image model that the user has on disk: CLIP-I and DINO.

Both are the mean cosine similarity of the embeddings of all pairs (DreamBooth, https://arxiv.org/abs/2208.12242, section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.errors import UserError, first_line
from kohya_ext.preflight.data import images_of

_REFERENCES = 64
"""Largest number of training images that samples are compared with."""

_BATCH = 8
"""Number of images that are embedded together."""


@dataclass
class ImageModel:
    """A vision model of transformers in a folder, such as CLIP or DINOv2. Runs on the CPU, because the GPU may be training."""

    folder: Path
    _embeddings: dict[Path, Any] = field(default_factory=dict)
    """File -> its embedding of length 1; None if it cannot be read. Kept for the next report of a run that trains."""
    _loaded: tuple[Any, Any] | None = None

    def similarities(self, sample: Path, references: Sequence[Path]) -> list[float]:
        """Return the cosine similarities of an image to others; those that cannot be read are left out."""
        self._embed([sample, *references])
        own = self._embeddings[sample]
        others = [self._embeddings[file] for file in references]
        return [] if own is None else [float(own @ other) for other in others if other is not None]

    def _embed(self, files: Iterable[Path]) -> None:
        import torch

        missing = [file for file in dict.fromkeys(files) if file not in self._embeddings]
        for start in range(0, len(missing), _BATCH):
            read = {file: _read(file) for file in missing[start : start + _BATCH]}
            self._embeddings |= dict.fromkeys(read)
            known = {file: image for file, image in read.items() if image is not None}
            if known:
                with torch.inference_mode():
                    embedded = torch.nn.functional.normalize(self._features(list(known.values())).float(), dim=-1)
                self._embeddings |= dict(zip(known, embedded, strict=True))

    def _features(self, images: Sequence[Any]) -> Any:
        """Return embeddings, shape (images, features)."""
        model, processor = self.load()
        inputs = processor(images=images, return_tensors="pt")
        outputs = model.get_image_features(**inputs) if hasattr(model, "get_image_features") else model(**inputs)
        if hasattr(outputs, "shape"):
            return outputs
        pooled = getattr(outputs, "pooler_output", None)
        return outputs.last_hidden_state[:, 0] if pooled is None else pooled

    def load(self) -> tuple[Any, Any]:
        """Return model and processor. Raises UserError for a folder without them; nothing is downloaded."""
        if self._loaded is None:
            try:
                from transformers import AutoImageProcessor, AutoModel

                model = AutoModel.from_pretrained(self.folder, local_files_only=True).eval()
                self._loaded = model, AutoImageProcessor.from_pretrained(self.folder, local_files_only=True)
            except (ImportError, OSError, ValueError, KeyError) as error:
                raise UserError(
                    f"--image_model {self.folder}: {first_line(error)}; give the folder of an image model of transformers "
                    "(config.json, preprocessor_config.json, weights): openai/clip-vit-base-patch32, facebook/dinov2-base"
                ) from None
        return self._loaded


def _read(file: Path) -> Any:
    """Return an RGB image; None if it cannot be read."""
    from PIL import Image

    try:
        if not file.is_file():  # a pipe would block
            return None
        with Image.open(file) as image:
            return image.convert("RGB")
    except Exception:  # a damaged image raises errors of many types
        return None


def references(folders: Iterable[Mapping[str, Any]]) -> list[Path]:
    """Return images of a run's folders, evenly; those of regularization are left out."""
    files = [file for row in folders if not row.get("regularization") for file in _images(Path(str(row.get("folder"))))]
    return files[:: max(math.ceil(len(files) / _REFERENCES), 1)]


def _images(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from images_of(folder)
