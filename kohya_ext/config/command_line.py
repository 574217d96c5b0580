"""Command lines as words: this process's own with arguments changed, to paste and run next, and their values by key."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import flags, negated_flags, options

#: Characters that cmd takes for its own outside of quotes.
_CMD_SPECIAL = frozenset("&|<>^()!,;=")


def again(changes: Mapping[str, object]) -> str:
    """Return a command line that starts this process's run again in a fresh shell, with arguments of its script changed.

    It goes through ``python -m kohya_ext`` however this process was started, with the options that came from environment
    variables as flags: what a shell or the GUI had set is not there the next time. On Windows it is for cmd.
    """
    words = list(sys.orig_argv)
    script = Path(sys.argv[0])
    # The launcher's own options stand before the script, and it may be given without its suffix.
    names = (script.name, script.stem)
    place = next((index for index, word in enumerate(words) if index and Path(word).name in names), None)
    # An embedded interpreter has no command line of its own.
    interpreter, given = ([], sys.argv[1:]) if place is None else (words[1:place], words[place + 1 :])
    through = [] if any(Path(word).stem in ("kohya_ext", "kohya-ext") for word in interpreter) else ["-m", "kohya_ext"]
    arguments = rewritten([*_from_environment([*interpreter, *given]), *given], changes)
    command = quoted([sys.executable, *interpreter, *through, os.path.abspath(script), *arguments])
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    if os.name == "nt":
        chosen = "" if gpus is None else f'set "CUDA_VISIBLE_DEVICES={gpus}" && '
        return f"cd /d {quoted([os.getcwd()])} && {chosen}{command}"
    chosen = "" if gpus is None else f"CUDA_VISIBLE_DEVICES={shlex.quote(gpus)} "
    return f"cd {shlex.quote(os.getcwd())} && {chosen}{command}"


def _from_environment(given: Sequence[str]) -> list[str]:
    """Return the extension's options that environment variables set and the command line does not, as flags."""
    spelled = {word.split("=")[0] for word in given}
    words: list[str] = []
    for name, option in options("training"):
        text = os.environ.get(option.variable) if option.variable else None
        if text is None or spelled.intersection([*flags(name), *negated_flags(name)]):
            continue
        if option.is_switch:
            words += spelt(name, bool(option.parse(text)))
        elif text:
            words += spelt(name, text)
    return words


def quoted(words: Sequence[str]) -> str:
    """Return words as one line for the shell of this system: sh, or cmd on Windows."""
    return " ".join(map(_quoted_for_cmd, words)) if os.name == "nt" else shlex.join(words)


def _quoted_for_cmd(word: str) -> str:
    line = subprocess.list2cmdline([word])
    return f'"{line}"' if line == word and _CMD_SPECIAL.intersection(word) else line


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
