"""Exchange peaks of memory and times between the processes of a run, through a small file for each next to the journal.

Nothing waits for another process, so a process that has failed cannot block the others, as it could in a collective
operation. The first process reads the files during the run and at its end, and then removes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.run.journal_lines import checked_ranks
from kohya_ext.run.plain_file import create

INTERVAL = 30.0
"""Seconds between two writes of the times, and between two reads."""

OWN_SECONDS = "own_seconds"
"""The key of the mean of :class:`OwnWork` in a report."""

_GROWTH = 1.01
"""Growth of a peak after which the file is written again."""

_SLOW = 1.1
"""Smallest ratio of the times of two processes that is reported."""


@dataclass
class OwnWork:
    """The time in which a process waits for no other: it loads a batch and computes the forward pass.

    Backward is left out, because it waits for the gradients of the other processes.
    """

    device: Any
    seconds: float = 0.0
    batches: int = 0
    _began: Any = None
    _running: list[tuple[Any, Any]] = field(default_factory=list)
    """CUDA events around forward passes that the GPU may not have finished."""

    def add_data(self, seconds: float) -> None:
        """Add the wait for a batch."""
        self.seconds += seconds

    def begin_forward(self) -> None:
        """Mark the beginning of a forward pass."""
        self._began = self._now()

    def end_forward(self) -> None:
        """Mark its end."""
        if self._began is None:
            return
        self.batches += 1
        if self.device.type == "cuda":
            self._running.append((self._began, self._now()))
            while self._running and self._running[0][1].query():  # does not wait
                began, ended = self._running.pop(0)
                self.seconds += began.elapsed_time(ended) / 1000
        else:
            self.seconds += self._now() - self._began
        self._began = None

    def mean(self) -> float | None:
        """Return the mean seconds per batch; None before the first."""
        measured = self.batches - len(self._running)
        return self.seconds / measured if measured else None

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class RankReport:
    """The report of one process."""

    journal: Path
    rank: int
    host: str
    peaks: dict[str, int] = field(default_factory=dict)
    """The largest values so far, in bytes."""
    _written: dict[str, int] = field(default_factory=dict)
    _time: float = 0.0

    def add(self, peaks: Mapping[str, int], own_seconds: float | None = None) -> None:
        """Add peaks and a mean time; write the file if a peak has grown, or the time after an interval.

        A full disk costs the file and not the run.
        """
        for name, size in peaks.items():
            self.peaks[name] = max(size, self.peaks.get(name, 0))
        is_due = own_seconds is not None and time.monotonic() - self._time >= INTERVAL
        if not is_due and all(size <= _GROWTH * self._written.get(name, 0) for name, size in self.peaks.items()):
            return
        self.write(own_seconds)

    def write(self, own_seconds: float | None) -> None:
        """Write the file."""
        self._written, self._time = dict(self.peaks), time.monotonic()
        file = self.journal.with_name(f"{self.journal.name}.rank{self.rank}.json")
        partial = file.with_name(f"{file.name}.partial")
        row = {"rank": self.rank, "host": self.host, **self.peaks}
        if own_seconds is not None:
            row[OWN_SECONDS] = round(own_seconds, 6)
        with contextlib.suppress(OSError):
            create(partial, json.dumps(row))
            os.replace(partial, file)  # fails on Windows while the first process reads it; the next write replaces it


def read(journal: Path) -> list[dict[str, Any]]:
    """Return the reports of all other processes in the order of their ranks."""
    rows = []
    for file in _files(journal):
        with contextlib.suppress(OSError):
            rows += checked_ranks(file.read_text(encoding="utf-8", errors="replace"))
    return sorted(rows, key=lambda row: int(row["rank"]))


def slowest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of the slowest process; empty if all are about as fast, or their times are unknown."""
    known = sorted((row for row in rows if row.get(OWN_SECONDS)), key=lambda row: float(row[OWN_SECONDS]))
    if len(known) < 2 or known[-1][OWN_SECONDS] < _SLOW * known[0][OWN_SECONDS]:
        return ""
    last, first = known[-1], known[0]
    return (
        f"rank {last['rank']} on {last['host']}, {last[OWN_SECONDS]:.3g} s per batch for data and forward; "
        f"the fastest {first[OWN_SECONDS]:.3g} s"
    )


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
