"""What trials have chosen: in the user's cache, for later runs, and in saved states, so that a resume computes as before.

Reading needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext import cache
from kohya_ext.renames import replace_text
from kohya_ext.speed import switches

STATE_FILE = "kohya_ext_speed.json"
"""The file in a state's folder with the features that change results by rounding."""

_FOLDER, _SCHEMA = "speed", 1

#: The end of the name of a file with notes, and how many ended processes count.
_NOTES, _SEVERAL = "-tries", 2

#: How many times as much time makes a second trial worthwhile.
_MORE = 1.5


@dataclass(frozen=True)
class Verdict:
    """The features that a trial has chosen for a machine, settings and a batch's shapes."""

    features: tuple[str, ...]
    eager: float
    """Seconds of an eager forward and backward pass."""
    seconds: float
    """The same with the features."""
    day: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    candidates: Sequence[Mapping[str, Any]] = ()
    """All candidates with their measurements, as JSON data."""
    allowed: float = 0.0
    """The seconds that the trial was allowed."""

    def lacks(self, allowed: float) -> bool:
        """Return whether a trial that is allowed more seconds would try candidates that this one had no time for."""
        return allowed > _MORE * self.allowed > 0 and not all(each.get("in_time", True) for each in self.candidates)


def key(*parts: object) -> str:
    """Return the name of the file for what a verdict depends on, as JSON data."""
    return hashlib.sha256(json.dumps([_SCHEMA, *parts], sort_keys=True, default=str).encode()).hexdigest()[:16]


def load(key: str) -> Verdict | None:
    """Return the verdict that was kept; None if there is none that this release can use."""
    try:
        document = json.loads(_file(key).read_text(encoding="utf-8"))
        verdict = Verdict(**{**document, "features": _known(document["features"])})
        return verdict if min(float(verdict.seconds), float(verdict.eager)) > 0 else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store(key: str, verdict: Verdict) -> None:
    """Keep a verdict. Raises OSError."""
    replace_text(_file(key), json.dumps(asdict(verdict), indent=1) + "\n")


@contextmanager
def noted(key: str, features: Sequence[str]) -> Iterator[None]:
    """Note while features are tried; the note remains if they end the process. Without a writable cache nothing is noted."""
    name = "+".join(features)
    before = _ended(key)
    _note(key, {**before, name: before.get(name, 0) + 1})
    try:
        yield
    finally:
        _note(key, {each: count for each, count in _ended(key).items() if each != name})


def condemn(key: str, features: Sequence[str]) -> None:
    """Keep that features end processes, which one has shown. Raises OSError."""
    replace_text(_file(key + _NOTES), json.dumps({**_ended(key), "+".join(features): _SEVERAL}) + "\n")


def fatal(key: str) -> list[tuple[str, ...]]:
    """Return the features that have ended several processes while they were tried: once may have been the user."""
    return [tuple(name.split("+")) for name, count in _ended(key).items() if count >= _SEVERAL]


def _ended(key: str) -> dict[str, int]:
    try:
        document = json.loads(_file(key + _NOTES).read_text(encoding="utf-8"))
        return {str(name): int(count) for name, count in document.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _note(key: str, ended: Mapping[str, int]) -> None:
    with suppress(OSError):
        if ended:
            replace_text(_file(key + _NOTES), json.dumps(ended) + "\n")
        else:
            _file(key + _NOTES).unlink(missing_ok=True)


def forget() -> None:
    """Remove all verdicts and notes that were kept. Raises OSError."""
    for file in (cache.folder() / _FOLDER).glob("*.json"):
        file.unlink(missing_ok=True)


def write_to_state(folder: Path, features: Sequence[str]) -> None:
    """Write the features that change results to a saved state. Raises OSError."""
    (folder / STATE_FILE).write_text(json.dumps({"features": list(features)}) + "\n", encoding="utf-8")


def read_from_state(folder: Path) -> tuple[str, ...]:
    """Return the features with which a state's run computed; none for a state without the file."""
    try:
        return _known(json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))["features"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def _known(features: object) -> tuple[str, ...]:
    """Return the names of a file's features. Raises ValueError if there is one that this release does not have."""
    names = tuple(features) if isinstance(features, (list, tuple)) else None
    if names is None or not set(names) <= {switch.name for switch in switches.ALL}:
        raise ValueError("unknown features")
    return names


def _file(key: str) -> Path:
    return cache.folder() / _FOLDER / f"{key}.json"
