"""How a benchmark reports a process that failed."""

from __future__ import annotations

from pathlib import Path


class WorkerError(Exception):
    """A measured process failed or wrote no result."""


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
