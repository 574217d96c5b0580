"""Class captions: captions with a class instead of the trigger word, and their cached text encoder outputs.

Output preservation compares the LoRA's output on them with the base model's. With cached text encoder outputs, the class
caption of each caption is encoded too, after all captions, so that these are encoded in the same batches as without it.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kohya_ext.caching.caption_variants import Image, image_of
from kohya_ext.patching.attributes import replaced

MARK = "_class-"
"""Precedes the text's hash in the name of a file of text encoder outputs."""

OUTPUTS = "kohya_ext_class_outputs"
"""The attribute of a dataset with its class captions' outputs, and the key of a batch with those of its images."""

Outputs = Mapping[str, tuple[Any, str | None]]
"""Caption -> the outputs of its class caption in memory or None, and their file or None."""


@dataclass(frozen=True)
class ClassWord:
    """A trigger word and the class that replaces it: sks and person."""

    trigger: str
    word: str

    @classmethod
    def read(cls, value: object) -> ClassWord:
        """Read TRIGGER=CLASS, with spaces around both or not. Raises ValueError for anything else."""
        trigger, _, word = str(value).partition("=")
        if not trigger.strip() or not word.strip():
            raise ValueError(f"must be TRIGGER=CLASS, such as sks=person, not {value!r}")
        return cls(trigger.strip(), word.strip())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # Not \b: letters of Chinese and Japanese are part of a word there, and their words have no spaces.
        return re.compile(rf"(?<![a-z0-9_]){re.escape(self.trigger)}(?![a-z0-9_])", re.IGNORECASE)

    def is_in(self, caption: str) -> bool:
        """Return whether a caption contains the trigger, as a word, in lower or upper case."""
        return self._pattern.search(caption) is not None

    def of(self, caption: str) -> str:
        """Return the class caption of a caption. Without the trigger it is the caption."""
        return self._pattern.sub(lambda match: self.word, caption)


def images_of(dataset: Any, word: ClassWord) -> dict[str, Image]:
    """Return caption -> an image for the outputs of its class caption, one for each text."""
    texts, images = dict[str, Image](), dict[str, Image]()
    for info in dataset.image_data.values():
        text = word.of(info.caption)
        images[info.caption] = texts.setdefault(text, image_of(text, info, MARK))
    return images


def outputs_of(images: Mapping[str, Image]) -> Outputs:
    """Return the outputs of images that have been cached, by caption."""
    return {caption: (info.text_encoder_outputs, info.text_encoder_outputs_npz) for caption, info in images.items()}


@dataclass
class Recorded(Mapping[str, Image]):
    """The images of a dataset, and those that a batch has taken."""

    images: Mapping[str, Image]
    taken: list[Image] = field(default_factory=list)

    def __getitem__(self, key: str) -> Image:
        """Return an image, and record it."""
        self.taken.append(self.images[key])
        return self.taken[-1]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys of all images."""
        return iter(self.images)

    def __len__(self) -> int:
        """Return the number of all images."""
        return len(self.images)


@dataclass
class _InOrder(Mapping[str, Image]):
    """Images, of which each look-up returns the next one, whatever its key."""

    images: Iterator[Image]

    def __getitem__(self, key: str) -> Image:
        return next(self.images)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def collated(dataset: Any, getitem: Any, taken: Sequence[Image], outputs: Outputs) -> Any:
    """Return the class captions' outputs for the images of a batch, as upstream's ``getitem()`` collates those of captions.

    Leaves Python's random state as it is.
    """
    state = random.getstate()
    try:
        with replaced(dataset, "image_data", _InOrder(_with_outputs(taken, outputs))):
            return getitem()["text_encoder_outputs_list"]
    finally:
        random.setstate(state)


def _with_outputs(images: Iterable[Image], outputs: Outputs) -> Iterator[Image]:
    """Yield copies of images with the outputs of their class captions, and tiny latents, so that no file is read for them."""
    import torch

    for info in images:
        copied = copy.copy(info)
        copied.text_encoder_outputs, copied.text_encoder_outputs_npz = outputs[str(info.caption)]
        copied.latents = copied.latents_flipped = torch.zeros(1, 1, 1)
        copied.latents_original_size, copied.latents_crop_ltrb, copied.alpha_mask = (8, 8), (0, 0, 8, 8), None
        yield copied
