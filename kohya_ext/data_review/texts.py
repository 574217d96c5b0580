"""What can be wrong with the captions of a folder."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_LATIN = 0.7
"""Share of Latin letters from which on a caption may be English."""

_COMMON, _FEW = 0.9, 5
"""Share of a folder's captions from which on a first tag is its trigger, and the number of captions below which none is."""

_UNBALANCED, _MANY_TAGS = 0.8, 20
"""Share of a folder's captions from which on a tag is learned with the subject, and the captions from which on it counts."""

_LONGEST_TAG = 4
"""Words in a tag; longer parts between commas are sentences."""


@dataclass(frozen=True)
class Remarks:
    """Remarks on a folder's captions."""

    of_images: Mapping[int, Sequence[tuple[str, str]]]
    """Index of an image -> (kind, details)."""
    of_folder: Sequence[tuple[str, str]]


def remarks(captions: Sequence[str | None], english: bool, limit: int | None, count: Mapping[str, int]) -> Remarks:
    """Return the remarks on captions, None for an image without one.

    ``english``: the text encoder knows little else. ``limit``: the tokens that it reads; None if that is not known.
    ``count``: tokens of each caption, at least.
    """
    written = [text for text in captions if text]
    trigger = _trigger(written)
    given = {index: text for index, text in enumerate(captions) if text is not None}
    of_images = {index: list(_of_caption(text, trigger, english, limit, count)) for index, text in given.items()}
    return Remarks(of_images, list(_of_folder(written, trigger)))


def _of_caption(
    text: str, trigger: str | None, english: bool, limit: int | None, count: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    if not text.strip():
        yield "empty", ""
        return
    if trigger is not None and trigger not in _tags(text):
        yield "trigger", trigger
    if english and _share_of_latin(text) < _LATIN:
        yield "language", ""
    if limit is not None and count[text] > limit:
        yield "cut", f"at least {count[text]} tokens of {limit}"


def _of_folder(captions: Sequence[str], trigger: str | None) -> Iterator[tuple[str, str]]:
    if len(captions) >= _FEW and len({text.strip() for text in captions}) == 1:
        yield "same captions", f"{captions[0].strip()[:60]!r}"
        return
    if len(captions) < _MANY_TAGS:
        return
    counts = Counter(tag for text in captions for tag in set(_tags(text)) if len(tag.split()) <= _LONGEST_TAG)
    common = [(tag, number) for tag, number in counts.most_common() if tag != trigger and number >= _UNBALANCED * len(captions)]
    if common:
        yield "tags", ", ".join(f"{tag} ({number} of {len(captions)})" for tag, number in common[:5])


def _trigger(captions: Sequence[str]) -> str | None:
    """Return the tag that almost all captions begin with."""
    if len(captions) < _FEW:
        return None
    first, number = Counter(next(iter(_tags(text)), "") for text in captions).most_common(1)[0]
    return first if first and number >= _COMMON * len(captions) else None


def _tags(text: str) -> list[str]:
    return [tag for part in re.split(r"[,\n]", text.lower()) if (tag := part.strip())]


def _share_of_latin(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    latin = sum(unicodedata.name(letter, "").startswith(("LATIN", "FULLWIDTH LATIN")) for letter in letters)
    return latin / len(letters) if letters else 1.0
