"""Exchange peaks of memory between the processes of a run, through one small file for each process next to the journal.

Nothing waits for another process, so a process that has failed cannot block the others, as it could in a collective
operation. The first process reads the files at its end and removes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_GROWTH = 1.01
"""Growth of a peak after which the file is written again."""


@dataclass
class RankMemory:
    """The peaks of one process."""

    journal: Path
    rank: int
    host: str
    peaks: dict[str, int] = field(default_factory=dict)
    """The largest values so far, in bytes."""
    _written: dict[str, int] = field(default_factory=dict)

    def add(self, peaks: Mapping[str, int]) -> None:
        """Add peaks; write the file if one of them has grown. A full disk costs the file and not the run."""
        for name, size in peaks.items():
            self.peaks[name] = max(size, self.peaks.get(name, 0))
        if all(size <= _GROWTH * self._written.get(name, 0) for name, size in self.peaks.items()):
            return
        self._written = dict(self.peaks)
        file = self.journal.with_name(f"{self.journal.name}.rank{self.rank}.json")
        partial = file.with_name(f"{file.name}.partial")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps({"rank": self.rank, "host": self.host, **self.peaks}), encoding="utf-8")
            os.replace(partial, file)


def collect(journal: Path) -> list[dict[str, Any]]:
    """Return the peaks of all other processes in the order of their ranks, and remove their files."""
    rows = []
    for file in _files(journal):
        with contextlib.suppress(OSError, ValueError):
            rows.append(json.loads(file.read_text(encoding="utf-8")))
    remove(journal)
    return sorted(rows, key=lambda row: int(row["rank"]))


def remove(journal: Path) -> None:
    """Remove the files of the other processes, for example of an earlier run that was killed."""
    for file in [*_files(journal), *_files(journal, ".partial")]:
        with contextlib.suppress(OSError):
            file.unlink()


def _files(journal: Path, suffix: str = "") -> Iterator[Path]:
    kind = re.compile(rf"{re.escape(journal.name)}\.rank\d+\.json{re.escape(suffix)}")
    try:
        files = list(journal.parent.iterdir())
    except OSError:
        return
    yield from (file for file in files if kind.fullmatch(file.name))
