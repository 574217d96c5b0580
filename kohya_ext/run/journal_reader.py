"""Read the journal of a run: its status, progress, times, memory, losses and events. Does not import torch.

The reader opens files only for reading, takes no locks and sends no signals. It accepts unknown keys and kinds, and ignores
lines that are not complete. A journal may come from another person: :mod:`kohya_ext.run.journal_lines` checks each line.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
import socket
import statistics
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kohya_ext.errors import UserError
from kohya_ext.run.journal_lines import MAX_BYTES, checked_lines
from kohya_ext.run.plain_file import shared_reader
from kohya_ext.run.rank_reports import slowest

Status = Literal["RUNNING", "STOPPED", "DONE", "FAILED", "DEAD", "UNKNOWN"]

_WINDOW = 1000
"""Number of latest steps in the median time."""

_SMOOTHED = 50
"""Largest number of losses in a mean."""

_EVENTS = 200
"""Number of latest events to keep."""

_SILENCE = 300.0
"""Seconds without a line, after which a run on another host may have ended. At least 20 steps."""

_PEAKS = ("peak_allocated", "peak_reserved")

_BLOCK = 2**20
"""Number of bytes to read together."""

_CLOCK = 60.0
"""Difference in seconds up to which two start times of a process are the same."""


@dataclass
class RunLog:
    """The lines of a run, across its resumes. Steps that a resume has repeated count once."""

    id: str
    start: dict[str, Any] = field(default_factory=dict)
    """The latest ``start`` line."""
    training: dict[str, Any] = field(default_factory=dict)
    """The latest ``training`` line; empty while models are loaded."""
    end: dict[str, Any] | None = None
    """The ``end`` line of the latest process."""
    last: dict[str, Any] = field(default_factory=dict)
    """The latest ``step`` line."""
    parts: int = 0
    """The number of processes."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    """The loss of each step; NaN if it is not known."""
    seconds: array[float] = field(default_factory=lambda: array("d"))
    """The duration of each step, including the wait for data."""
    outside: array[float] = field(default_factory=lambda: array("d"))
    """Seconds between the previous step and each step: saving, sampling, validation."""
    reserved: array[int] = field(default_factory=lambda: array("q"))
    """Reserved memory at the end of each step, bytes; 0 if it is not known."""
    part_began: int = 0
    """Index of the latest process's first step."""
    profile: dict[str, Any] | None = None
    """The latest ``profile`` line."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """The latest reports of all processes: peaks of memory in bytes, and seconds per batch; empty for one process."""
    skipped: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    """Largest allocated and reserved memory of the latest process, bytes."""
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    saves: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> its latest ``save`` or ``state`` event."""
    time: float = 0.0
    """Time of the latest line, seconds since 1970."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        kind = line.get("kind")
        self.time = _number(line.get("time"), self.time)
        if kind == "step":
            self._add_step(line)
        elif kind == "start":
            self.start, self.training, self.end, self.peaks, self.ranks = line, {}, None, {}, []
            self.parts += 1
            self.part_began = len(self.steps)
        elif kind == "training":
            self.training = line
        elif kind == "ranks":
            self.ranks = list(line.get("ranks") or ())
        elif kind == "end":
            self.end, self.ranks = line, list(line.get("ranks") or ())
        elif kind == "profile":
            self.profile = line
        else:
            self.events.append(line)
            if kind in ("save", "state"):
                self.saves[str(line.get("file"))] = line
            elif kind == "skip":
                self.skipped += 1

    def _add_step(self, line: dict[str, Any]) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            return
        if self.steps and step <= self.steps[-1]:  # resumed from a state before the last step
            kept = bisect.bisect_left(self.steps, step)
            for column in (self.steps, self.losses, self.seconds, self.outside, self.reserved):
                del column[kept:]
            self.part_began = min(self.part_began, kept)
        self.last = line
        self.steps.append(step)
        self.losses.append(_number(line.get("loss"), math.nan))
        self.seconds.append(_number(line.get("seconds"), math.nan))
        self.outside.append(_number(line.get("outside"), 0.0))
        self.reserved.append(int(_number(line.get("reserved"), 0.0)))
        for name in _PEAKS:
            size = line.get(name)
            if isinstance(size, int) and size > self.peaks.get(name, 0):
                self.peaks[name] = size

    # --- values ------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of finished optimizer steps."""
        return self.steps[-1] if self.steps else 0

    @property
    def total(self) -> int | None:
        """The number of optimizer steps in all."""
        total = self.training.get("steps", self.start.get("steps"))
        return total if isinstance(total, int) and total > 0 else None

    def median_seconds(self) -> float | None:
        """Return the median duration of the latest process's last steps, without its first step, which warms up."""
        first = max(len(self.seconds) - _WINDOW, self.part_began)
        if first == self.part_began and len(self.seconds) - first > 1:
            first += 1
        durations = [value for value in self.seconds[first:] if math.isfinite(value)]
        return statistics.median(durations) if durations else None

    def seconds_left(self) -> float | None:
        """Return the expected time to the end, with saves and samples as often as so far; None when unknown."""
        median = self.median_seconds()
        if median is None or self.total is None:
            return None
        outside = self.outside[self.part_began + 1 :]
        return max(self.total - self.step, 0) * (median + sum(outside) / max(len(outside), 1))

    def first_loss(self) -> float | None:
        """Return the mean of the first :attr:`smoothing` losses that are numbers; the first step may have been skipped."""
        return _mean(list(itertools.islice(filter(math.isfinite, self.losses), self.smoothing)))

    def smoothed_loss(self) -> float | None:
        """Return the mean of the last :attr:`smoothing` losses; None if none of them is a number."""
        return _mean(self.losses[-self.smoothing :])

    @property
    def smoothing(self) -> int:
        """The number of losses in a mean: a tenth of the steps, from 1 to 50."""
        return max(1, min(_SMOOTHED, len(self.losses) // 10))

    def loss_curve(self, points: int) -> list[float]:
        """Return at most ``points`` means of consecutive losses, each of about as many steps."""
        count = len(self.losses)
        points = min(points, count)
        edges = [index * count // points for index in range(points + 1)] if points else []
        means = (_mean(self.losses[begin:end]) for begin, end in itertools.pairwise(edges))
        return [mean for mean in means if mean is not None]

    def newest_state(self) -> Path | None:
        """Return the newest saved state that still exists."""
        states = [line for line in self.saves.values() if line.get("kind") == "state"]
        newest_first = sorted(states, key=lambda line: _number(line.get("time"), 0.0), reverse=True)
        return next((Path(file) for line in newest_first if os.path.isdir(file := str(line.get("file")))), None)

    def status(self, now: float) -> Status:
        """Return the status of the latest process at a time in seconds since 1970."""
        if self.end is not None:
            ended: dict[object, Status] = {"finished": "DONE", "stopped": "STOPPED"}
            return ended.get(self.end.get("status"), "FAILED")
        alive = _is_alive(self.start)
        if alive is not None:
            return "RUNNING" if alive else "DEAD"
        silence = max(_SILENCE, 20 * (self.median_seconds() or 0.0))
        return "RUNNING" if now - self.time < silence else "UNKNOWN"

    def summary(self, now: float | None = None) -> dict[str, Any]:
        """Return the run as plain JSON data: times in seconds, memory in bytes, None for unknown values."""
        now = time.time() if now is None else now
        status = self.status(now)
        predicted = self.start.get("predicted") or {}
        seconds, data = self.last.get("seconds"), self.last.get("data")
        return {
            "run": self.id,
            "name": self.start.get("name"),
            "script": self.start.get("script"),
            "status": status,
            "reason": (self.end or {}).get("reason"),
            "exit_code": (self.end or {}).get("code"),
            "host": self.start.get("host"),
            "pid": self.start.get("pid"),
            "parts": self.parts,
            "started": self.start.get("time"),
            "updated": self.time,
            "step": self.step,
            "steps": self.total,
            "epoch": self.last.get("epoch"),
            "epochs": self.training.get("epochs"),
            "skipped": self.skipped,
            "seconds_left": self.seconds_left() if status == "RUNNING" else None,
            "seconds_per_step": {
                "now": seconds,
                "data": data,
                "median": self.median_seconds(),
                "predicted": predicted.get("seconds_per_step"),
            },
            "memory": {
                "reserved": self.last.get("reserved"),
                "allocated": self.last.get("allocated"),
                "peak_reserved": self.peaks.get("peak_reserved"),
                "peak_allocated": self.peaks.get("peak_allocated"),
                "predicted_reserved": predicted.get("reserved"),
                "gpu": (self.start.get("gpu") or {}).get("memory"),
            },
            "ranks": self.ranks,
            "slowest_rank": slowest(self.ranks),
            "gpu": (self.start.get("gpu") or {}).get("name"),
            "loss": {
                "now": self.last.get("loss"),
                "first": self.first_loss(),
                "smoothed": self.smoothed_loss(),
                "smoothing": self.smoothing,
            },
            "learning_rates": self.last.get("learning_rates"),
            "events": list(self.events),
            "command": self.start.get("command"),
            "stop_file": self.start.get("stop_file"),
            "next_command": self._next_command(status),
        }

    def _next_command(self, status: Status) -> str | None:
        """Return the command that continues the run from its newest state, or else starts it again; None if it needs none."""
        if status in ("RUNNING", "DONE"):
            return None
        return self.start.get("resume_command" if self.newest_state() is not None else "command")


@dataclass
class JournalReader:
    """Reads a journal's new lines at each :meth:`update`."""

    file: Path
    new_log: Callable[[str], RunLog] = RunLog
    """Returns an empty log for the id of a run."""
    runs: dict[str, RunLog] = field(default_factory=dict)
    """The runs of the file by id."""
    latest: RunLog | None = None
    """The run of the latest ``start`` line."""
    _offset: int = 0
    _rest: bytes = b""
    """The start of a line that is not complete yet."""

    def update(self) -> bool:
        """Read the lines since the last call; return whether there are any. Raises UserError when that fails."""
        try:
            with shared_reader(self.file) as stream:
                if os.fstat(stream.fileno()).st_size < self._offset:  # replaced by a shorter file
                    self.runs, self.latest, self._offset, self._rest = {}, None, 0, b""
                stream.seek(self._offset)
                new = False
                while content := stream.read(_BLOCK):
                    self._offset += len(content)
                    new = self._add(content) or new
        except OSError as error:
            raise UserError(f"cannot read the journal {self.file}: {error.strerror or error}") from None
        return new

    def _add(self, content: bytes) -> bool:
        """Add the lines that end in the next bytes of the file; return whether there are any.

        Lines longer than those of a run are left out.
        """
        *complete, rest = (self._rest + content).split(b"\n")
        self._rest = rest[: MAX_BYTES + 1]
        for line in checked_lines([line.decode(errors="replace") for line in complete if len(line) <= MAX_BYTES]):
            if line.get("kind") == "start":
                run = str(line.get("run"))
                self.latest = self.runs[run] = self.runs.get(run) or self.new_log(run)
            if self.latest is not None:
                self.latest.add(line)
        return bool(complete)


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def process_start(pid: int) -> float | None:
    """Return when a process started, in seconds since 1970; 0 if it has ended, None if that is not known."""
    try:
        import psutil
    except ImportError:
        return None
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return 0.0
    except (psutil.Error, OSError, ValueError, OverflowError):  # not allowed, or no process ID of this system
        return None


def _is_alive(start: Mapping[str, Any]) -> bool | None:
    """Return whether the process of a ``start`` line runs; None if that is not known, for example on another host."""
    pid = start.get("pid")
    if start.get("host") != socket.gethostname() or not isinstance(pid, int):
        return None
    began = process_start(pid)
    if began is None:
        return Path(f"/proc/{pid}").is_dir() if sys.platform == "linux" else None
    recorded = _number(start.get("process_started"), began)
    return began > 0 and abs(began - recorded) < _CLOCK
