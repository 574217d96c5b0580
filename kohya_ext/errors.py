"""The one kind of error that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from string import digits


class UserError(Exception):
    """Something the user can put right. The message is one line that says what is wrong and what to type; exit code 2."""

    exit_code = 2


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the nearest of ``known``, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""


def one_letter_off(word: str, right: str) -> bool:
    """Return whether a word of five letters or more is another one with one letter wrong, missing, added or two swapped.

    Names that differ in the number at their end are two names: ``learning_rate_te1`` and ``learning_rate_te2``.
    """
    if word.rstrip(digits) == right.rstrip(digits) or len(word) < 5 or abs(len(word) - len(right)) > 1:
        return False
    pairs = zip(word, right, strict=False)
    start = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(word), len(right)))
    one, other = word[start:], right[start:]
    swapped = one[1::-1] == other[:2] and one[2:] == other[2:]
    return swapped or one[1:] == other[1:] or one[1:] == other or one == other[1:]
