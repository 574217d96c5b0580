"""Remember which files of a folder have passed which check, so that the next start opens none of them.

Each folder of caches, or of images that are cached there, has an index: a hidden text file with a line
``SIZE MTIME CHECK NAME`` for each check that a file has passed. The size in bytes and the time of the last change in
nanoseconds identify the file's content. Lines are only appended, each folder's with one write. So the index survives SIGKILL,
and several processes may write it. A lost or torn line costs one more check of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from kohya_ext.run.atomic_write import write_atomically
from kohya_ext.run.plain_file import open_for_append

CACHES = ".kohya_ext_cache_index"
"""The file in a folder of caches."""

IMAGES = ".kohya_ext_image_index"
"""The file in a folder of images and captions."""

SUFFIXES = (".npz", ".safetensors")
"""Ends of the names of cache files."""

_SURPLUS_LINES = 1000
"""Lines of changed or deleted files beyond the number of valid ones, from which on the index is rewritten without them."""


def check_id(*parts: object) -> str:
    """Return the name of a check in the index, which depends on everything that decides its result."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


class FileIndex:
    """The indexes of all folders, read when a file of the folder is first asked for.

    Sizes and times are those of that moment: a directory listing instead of one call for each file. A folder without write
    access has an index only until the end of the process. Safe to use from several threads.
    """

    def __init__(self, name: str = CACHES, suffixes: tuple[str, ...] = SUFFIXES) -> None:
        """``name``: the file in each folder. ``suffixes``: ends of the names of its files, in lower case."""
        self._name, self._suffixes = name, suffixes
        self._passed: dict[str, dict[str, set[str]]] = {}
        self._stats: dict[str, dict[str, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def exists(self, path: str) -> bool:
        """Return whether the file existed when its folder was listed."""
        folder, name = os.path.split(path)
        self._read(folder)
        return name in self._stats[folder]

    def has_passed(self, path: str, check: str) -> bool:
        """Return whether the file, with the size and time of its folder's listing, has passed the check."""
        return check in self.passed(path)

    def passed(self, path: str) -> AbstractSet[str]:
        """Return the checks that the file has passed with the size and time of its folder's listing."""
        folder, name = os.path.split(path)
        self._read(folder)
        return self._passed[folder].get(name, frozenset())

    def add(self, path: str, check: str) -> None:
        """Record that the file as it is now has passed the check."""
        self.add_all([(path, check)])

    def add_all(self, passed: Iterable[tuple[str, str]]) -> None:
        """Record for each path that the file as it is now has passed the check; write once per folder."""
        lines: dict[str, list[str]] = {}
        for path, check in passed:
            folder, name = os.path.split(path)
            self._read(folder)
            with contextlib.suppress(OSError):
                stat = os.stat(path)
                self._passed[folder].setdefault(name, set()).add(check)
                if "\n" not in name:
                    lines.setdefault(folder, []).append(_line((stat.st_size, stat.st_mtime_ns), check, name))
        for folder, written in lines.items():
            with contextlib.suppress(OSError):
                _append(os.path.join(folder, self._name), written)

    def _read(self, folder: str) -> None:
        if folder in self._stats:
            return
        with self._lock:
            if folder in self._stats:
                return
            stats: dict[str, tuple[int, int]] = {}
            lines: list[str] = []
            with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
                for entry in entries:
                    if not entry.name.lower().endswith(self._suffixes):
                        continue
                    with contextlib.suppress(OSError):  # removed meanwhile
                        stats[entry.name] = (entry.stat().st_size, entry.stat().st_mtime_ns)
            file = os.path.join(folder, self._name)
            with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
                lines = [line for line in stream.read().split("\n") if line]
            passed: dict[str, set[str]] = {}
            valid = []
            for line in lines:
                size, time, check, name = [*line.split(" ", 3), "", "", ""][:4]
                if (size, time) == tuple(map(str, stats.get(name, ()))):
                    valid.append(line)
                    passed.setdefault(name, set()).add(check)
            self._passed[folder], self._stats[folder] = passed, stats
            if len(lines) - len(valid) > len(valid) + _SURPLUS_LINES:
                _rewrite(Path(file), valid)


def _line(stat: tuple[int, int], check: str, name: str) -> str:
    return f"{stat[0]} {stat[1]} {check} {name}"


def _append(file: str, lines: Sequence[str]) -> None:
    # The leading line break ends a line that a full disk has cut off.
    descriptor = open_for_append(Path(file))  # a downloaded folder may contain a link of that name
    try:
        os.write(descriptor, "\n{}\n".format("\n".join(lines)).encode(errors="surrogateescape"))
    finally:
        os.close(descriptor)


def _rewrite(file: Path, lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in dict.fromkeys(lines)).encode(errors="surrogateescape")
    with contextlib.suppress(OSError):
        write_atomically(file, lambda temporary: temporary.write_bytes(text), lambda: len(text))
