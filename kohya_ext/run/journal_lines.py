"""Check lines of a journal, which may come from another person: their length, depth, numbers and the types of known keys.

The values of a checked line have the types of :data:`_SHAPES`. A value of another type is left out, as if the line did
not have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kohya_ext.console import printable

PRESERVATION_LOSS = "preservation_loss"
"""The key of a step's loss of --output_preservation."""

MAX_BYTES = 2**20
"""The longest line that is read. A run with hundreds of folders and settings writes lines of about 100 kB."""

_TEXT = 20_000
"""Number of characters of a text to keep."""

_ITEMS = 2_000
"""Number of items of a list or a table to keep."""

_DEPTH = 6
"""Largest depth of values with unknown keys."""

_LARGEST = 2**53
"""The largest number; beyond it, neither floats nor JavaScript have all integers."""

_TOGETHER = 500
"""Number of lines to parse together."""

Shape = Callable[[Any], Any]
"""Returns a value, or :data:`_WRONG` if it has another type."""

_WRONG = object()


def checked_lines(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects, with checked values. Lines of killed processes are incomplete."""
    for begin in range(0, len(lines), _TOGETHER):
        part = list(filter(None, lines[begin : begin + _TOGETHER]))
        try:
            values = json.loads(f"[{','.join(part)}]")  # faster than line by line
        except (ValueError, RecursionError):
            values = map(_parsed, part)
        yield from (_checked(value) for value in values if isinstance(value, dict))


def checked_ranks(text: str) -> list[dict[str, Any]]:
    """Return the report of another process from its file, as in the key ``ranks`` of a line; empty if it has none."""
    ranks: list[dict[str, Any]] = _SHAPES["ranks"]([_parsed(text)])
    return ranks


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _checked(line: Mapping[str, Any]) -> dict[str, Any]:
    values = {printable(key): _SHAPES.get(key, _anything)(value) for key, value in line.items()}
    return {key: value for key, value in values.items() if value is not _WRONG}


# --- shapes ----------------------------------------------------------------------------------------------------------


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not -_LARGEST < value < _LARGEST:  # False for NaN, too
        return None if value is None or isinstance(value, float) else _WRONG
    return value


def _code(value: Any) -> Any:
    return value if value is None or (type(value) is int and abs(value) < _LARGEST) else _WRONG


def _count(value: Any) -> Any:
    return value if type(value) is int and 0 <= value < _LARGEST else _WRONG


def _time(value: Any) -> Any:
    """Return seconds since 1970, before the year 3000, which every system's calendar knows."""
    return value if type(value) in (int, float) and 0 <= value < 32_503_680_000 else _WRONG


def _text(value: Any) -> Any:
    return printable(value[:_TEXT], lines=True) if isinstance(value, str) else None if value is None else _WRONG


def _name(value: Any) -> Any:
    return printable(value[:_TEXT]) if isinstance(value, str) else None if value is None else _WRONG


def _list(shape: Shape) -> Shape:
    def check(value: Any) -> Any:
        if not isinstance(value, list):
            return _WRONG
        return [item for item in map(shape, value[:_ITEMS]) if item is not _WRONG and item is not None]

    return check


def _table(shape: Shape) -> Shape:
    """Return the shape of a dictionary with any keys."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return None if value is None else _WRONG
        items = ((printable(key), shape(item)) for key, item in list(value.items())[:_ITEMS])
        return {key: item for key, item in items if item is not _WRONG}

    return check


def _record(shapes: Mapping[str, Shape], needed: Sequence[str] = (), others: Shape = lambda value: _WRONG) -> Shape:
    """Return the shape of a dictionary with these keys, of which the ``needed`` ones are not missing, and ``others``."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return None if value is None else _WRONG
        items = {printable(key): shapes.get(key, others)(item) for key, item in list(value.items())[:_ITEMS]}
        kept = {key: item for key, item in items.items() if item is not _WRONG}
        return kept if all(kept.get(key) is not None for key in needed) else _WRONG

    return check


def _either(*shapes: Shape) -> Shape:
    return lambda value: next((item for shape in shapes if (item := shape(value)) is not _WRONG), _WRONG)


def _anything(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value of an unknown key with short texts, finite numbers, and no more levels than ``depth``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (list, dict)):
        if not depth:
            return None
        if isinstance(value, list):
            return [_plain(_anything(item, depth - 1)) for item in value[:_ITEMS]]
        return {printable(key): _plain(_anything(item, depth - 1)) for key, item in list(value.items())[:_ITEMS]}
    return _number(value)


def _plain(value: Any) -> Any:
    return None if value is _WRONG else value


_MEMORY = _table(_count)
_RANK = {"rank": _count, "host": _name, "own_seconds": _number}
_GPU = {"name": _name, "memory": _count, "uuid": _name}
_PREDICTED = {"seconds_per_step": _number, "reserved": _count, "allocated": _count, "peak_phase": _name}
_FOLDER = {
    "folder": _name,
    "repeats": _count,
    "regularization": _anything,
    "images": _count,
    "captioned": _count,
    "caption": _name,
}
_BLOCK = {"name": _name, "device": _number, "host": _number}

#: Key of a line -> shape of its value. ``images`` is a number, or the names of a skipped step's images.
_SHAPES: Mapping[str, Shape] = {
    **dict.fromkeys(("kind", "run", "name", "script", "host", "kohya_ext", "sd_scripts", "torch"), _name),
    **dict.fromkeys(("file", "resumed_from", "stop_file", "command", "resume_command", "status", "phase", "limit"), _name),
    **dict.fromkeys(("reason", "problem", "captions_problem", "summary", "verdict", "table", "trace"), _text),
    **dict.fromkeys(("step", "steps", "epoch", "epochs", "pid", "processes", "first", "last", "bytes"), _count),
    **dict.fromkeys(("reserved", "allocated", "peak_reserved", "peak_allocated", "images_with_repeats"), _count),
    **dict.fromkeys(("loss", "error", "seconds", "data", "outside", "process_started", PRESERVATION_LOSS), _number),
    **dict.fromkeys(("losses", "learning_rates"), _list(_number)),
    **dict.fromkeys(("problems", "advice", "sample_prompts"), _list(_name)),
    "code": _code,
    "time": _time,
    "memory": _MEMORY,
    "images": _either(_count, _list(_name)),
    "gpu": _record(_GPU),
    "predicted": _record(_PREDICTED),
    "ranks": _list(_record(_RANK, needed=("rank", "host"), others=_count)),
    "folders": _list(_record(_FOLDER, needed=("folder", "repeats", "images", "captioned"))),
    "blocks": _list(_record(_BLOCK)),
    "bands": _table(_number),
    "buckets": _table(_count),
    "tags": _table(_count),
    "settings": _table(_anything),
    "patches": _table(_list(_name)),
    "batch_sizes": _list(_count),
}
