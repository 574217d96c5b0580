"""The one kind of error that a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The message is one line that says what is wrong and what to type; exit code 2."""

    exit_code = 2


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the nearest of ``known``, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
