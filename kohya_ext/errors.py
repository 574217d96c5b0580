"""Errors for users."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from string import digits


class UserError(Exception):
    """An error that the user can fix. The message is one line with the problem and its fix; the exit code is 2."""

    exit_code = 2


def first_line(problem: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(problem).__name__}: {next(iter(str(problem).splitlines()), '')}".removesuffix(": ")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the nearest of ``known``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""


def one_letter_off(word: str, right: str) -> bool:
    """Return whether a word of at least five letters is one edit from ``right``: a letter changed, missing, added or swapped.

    Names that only differ in a number at their end do not count: ``learning_rate_te1`` and ``learning_rate_te2``.
    """
    if word.rstrip(digits) == right.rstrip(digits) or len(word) < 5 or abs(len(word) - len(right)) > 1:
        return False
    pairs = zip(word, right, strict=False)
    start = next((at for at, (letter, other) in enumerate(pairs) if letter != other), min(len(word), len(right)))
    rest, other = word[start:], right[start:]
    swapped = rest[1::-1] == other[:2] and rest[2:] == other[2:]
    return swapped or rest[1:] == other[1:] or rest[1:] == other or rest == other[1:]
