"""Captions that are processed and encoded in advance: a few variants for each image, of which a training step takes one.

Upstream's own ``process_caption`` makes the variants, with random numbers that depend only on the seed, the caption and the
number of the variant. A step chooses by a hash of the seed, the epoch, the image and its place in the epoch. Neither draws from
the random numbers of the run. Dropping a caption is decided in each step, with exactly the rate that is set.

Equal texts are encoded once. The name of a file on disk has the hash of its text: a changed caption or option never reads it.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Attributes of a subset that make upstream's processing change a caption.
PROCESSING = (
    *("shuffle_caption", "caption_tag_dropout_rate", "caption_dropout_rate", "caption_dropout_every_n_epochs"),
    *("enable_wildcard", "caption_prefix", "caption_suffix", "secondary_separator"),
)

MARK = "_caption-"
"""Precedes the text's hash in the name of a file of text encoder outputs."""

_DIGITS = 16
"""Digits of the hash."""

_MARKED = re.compile(f"{MARK}[0-9a-f]{{{_DIGITS}}}$")

Image = Any  # upstream's ImageInfo


class ProcessedCaption(str):
    """A variant, which upstream must not process again where it still tokenizes captions."""


def is_processed(subset: Any) -> bool:
    """Return whether the options of a subset change its captions."""
    return any(getattr(subset, name, None) for name in PROCESSING)


def kept(subset: Any) -> Any:
    """Return a copy of a subset that drops no caption."""
    copied = copy.copy(subset)
    copied.caption_dropout_rate, copied.caption_dropout_every_n_epochs = 0.0, 0
    return copied


@dataclass(frozen=True)
class Variants:
    """The processed captions of one image, and how often its caption is dropped."""

    texts: tuple[str, ...]
    name: str
    """The image's folder and file: the same on every machine."""
    dropout_rate: float = 0.0
    dropout_every_n_epochs: int = 0

    @property
    def all_texts(self) -> tuple[str, ...]:
        """All texts that a step may take."""
        return (*self.texts, "") if self.dropout_rate > 0 or self.dropout_every_n_epochs > 0 else self.texts

    def choose(self, seed: int, epoch: int, place: tuple[int, int]) -> str:
        """Return the text for the image at a place of an epoch: the number of the batch, and the place in the batch."""
        digest = hashlib.sha256(f"{seed} {epoch} {place} {self.name}".encode(errors="surrogateescape")).digest()
        every = self.dropout_every_n_epochs
        if int.from_bytes(digest[:8], "big") < self.dropout_rate * 2**64 or (every > 0 and epoch % every == 0):
            return ""
        return self.texts[int.from_bytes(digest[8:16], "big") % len(self.texts)]


def variants_of(dataset: Any, image: Image, count: int, seed: int) -> Variants:
    """Return an image's variants, made by the dataset's own processing. Leaves Python's random state as it is."""
    subset = dataset.image_to_subset[image.image_key]
    texts, state = [], random.getstate()
    try:
        for number in range(count):
            random.seed(f"{seed} {number} {image.caption}")
            texts.append(str(dataset.process_caption(kept(subset), image.caption)))
    finally:
        random.setstate(state)
    folder, file = os.path.split(image.absolute_path)
    rates = (subset.caption_dropout_rate, subset.caption_dropout_every_n_epochs)
    return Variants(tuple(texts), f"{os.path.basename(folder)}/{file}", *rates)


@dataclass
class Plan:
    """The images and texts to encode for a dataset."""

    images: dict[str, Image]
    """The images whose captions are not processed, then one image for each text, all by key."""
    texts: dict[str, Image]
    """Text -> its image among these, whose outputs are those of the text."""
    variants: dict[str, Variants]
    """Key of an image of the dataset -> its variants."""

    def captions(self, is_fixed: bool) -> CachedCaptions:
        """Return the captions with their outputs, which have been cached. ``is_fixed``: see there."""
        outputs = {text: (info.text_encoder_outputs, info.text_encoder_outputs_npz) for text, info in self.texts.items()}
        return CachedCaptions(self.variants, outputs, is_fixed)


def plan(dataset: Any, count: int, seed: int) -> Plan:
    """Return what to encode for a dataset, with ``count`` variants of each caption that its options change."""
    images, texts, variants = {}, dict[str, Image](), dict[str, Variants]()
    for key, info in dataset.image_data.items():
        if not is_processed(dataset.image_to_subset[key]):
            images[key] = info
            continue
        variants[key] = variants_of(dataset, info, count, seed)
        for text in variants[key].all_texts:
            if text not in texts:
                texts[text] = image_of(text, info)
    return Plan({**images, **{info.image_key: info for info in texts.values()}}, texts, variants)


def image_of(text: str, image: Image, mark: str = MARK) -> Image:
    """Return a copy of an image, or of a copy, for the outputs of a text. Its path, which does not exist, names their file."""
    stem, suffix = os.path.splitext(image.absolute_path)
    copied = copy.copy(image)
    copied.caption = text
    name = f"{_MARKED.sub('', stem)}{mark}{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
    copied.image_key = copied.absolute_path = f"{name}{suffix}"
    copied.text_encoder_outputs = copied.text_encoder_outputs_npz = None
    copied.caption_dropout_rate = 0.0  # Anima would drop the cached caption again
    return copied


@dataclass
class CachedCaptions:
    """The variants of a dataset's captions, with their text encoder outputs in host memory or their files."""

    variants: Mapping[str, Variants]
    outputs: Mapping[str, tuple[Any, str | None]]
    """Text -> its outputs in memory or None, and its file or None."""
    is_fixed: bool
    """Whether each image always has its first variant, so that validation losses of two epochs can be compared."""
    epoch: Any = field(default=None)
    """The number of the epoch, shared with the data loader's workers. A dataset learns of it one batch too late."""

    def chosen(self, dataset: Any, image: Image, place: tuple[int, int]) -> Image:
        """Return an image with the variant for its place in the epoch, or as it is if its caption is not processed."""
        variants = self.variants.get(image.image_key)
        if variants is None:
            return image
        epoch = dataset.current_epoch if self.epoch is None else self.epoch.value
        text = variants.texts[0] if self.is_fixed else variants.choose(dataset.seed, epoch, place)
        copied = copy.copy(image)
        copied.caption = ProcessedCaption(text)
        copied.text_encoder_outputs, copied.text_encoder_outputs_npz = self.outputs[text]
        return copied


class ImagesOfBatch(Mapping[str, Image]):
    """The images of a dataset, of which each look-up is the next place of a batch: an image may be in it twice."""

    def __init__(self, captions: CachedCaptions, dataset: Any, batch: int) -> None:
        """``batch``: the number of the batch."""
        self._captions, self._dataset, self._images = captions, dataset, dataset.image_data
        self._places = zip(itertools.repeat(batch), itertools.count(), strict=False)

    def __getitem__(self, key: str) -> Image:
        """Return the image at the next place."""
        return self._captions.chosen(self._dataset, self._images[key], next(self._places))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of all images."""
        return iter(self._images)

    def __len__(self) -> int:
        """Return the number of all images."""
        return len(self._images)


def older_files(paths: Iterable[str]) -> list[str]:
    """Return the files of other texts in the folders of these files of variants, made by the same strategy."""
    paths = [*paths]
    current, endings = {os.path.normcase(path) for path in paths}, {_ending(path) for path in paths}
    files = (entry.path for folder in {os.path.dirname(path) for path in paths} for entry in os.scandir(folder or "."))
    others = (path for path in files if MARK in os.path.basename(path) and _ending(path) in endings)
    return sorted(path for path in others if os.path.normcase(path) not in current)


def _ending(path: str) -> str:
    return path.rpartition(MARK)[2][_DIGITS:]
