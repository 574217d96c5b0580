"""Command lines as words: this process's own with arguments changed, to paste and run next, and their values by key."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_ext.settings import flags, negated_flags


def again(changes: Mapping[str, object]) -> str:
    """Return what started this process, with arguments of its script changed, quoted for the shell."""
    words = list(sys.orig_argv)
    script = Path(sys.argv[0]).name
    # The launcher's own options stand before the script, and may be given without its suffix.
    place = next((index for index, word in enumerate(words) if index and Path(word).name in (script, script[:-3])), len(words))
    return quoted([*words[: place + 1], *rewritten(words[place + 1 :], changes)])


def quoted(words: Sequence[str]) -> str:
    """Return words as one line for the shell of this system."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def rewritten(arguments: Sequence[str], changes: Mapping[str, object]) -> list[str]:
    """Return a script's arguments with changes made: earlier words for a key are dropped, the new ones stand at the end.

    False turns a switch off, a list stands for several words, None takes the argument away.
    """
    spellings = {flag for key in changes for flag in [*flags(key), *negated_flags(key)]}
    kept: list[str] = []
    dropping = False
    for word in arguments:
        if word.startswith("--"):
            dropping = word.split("=")[0] in spellings
        if not dropping:
            kept.append(word)
    return kept + [word for key, value in changes.items() for word in spelt(key, value)]


def spelt(key: str, value: object) -> list[str]:
    """Return the words that set one argument; none for None."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [f"--{key}", *map(str, values)]


def values_of(argv: Sequence[str]) -> dict[str, Any]:
    """Return the values on a command line by key: numbers as such, several words as a list, a switch as a boolean."""
    found: dict[str, Any] = {}
    key = ""
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            off = key.startswith("no-")
            key = key.removeprefix("no-").replace("-", "_")
            found[key] = _number(value) if equals else not off
        elif found.get(key) is True:
            found[key] = _number(word)
        elif key:
            found[key] = [*(found[key] if isinstance(found[key], list) else [found[key]]), _number(word)]
    return found


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word
