"""Find what the journal of a run says about one of its files: its step and its validation loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kohya_ext.errors import UserError
from kohya_ext.reporting.history import History
from kohya_ext.run.journal import SUFFIX
from kohya_ext.run.journal_reader import JournalReader
from kohya_ext.weights.judgement import Training


def of_file(file: Path, metadata: Mapping[str, str], journal: Path | None = None) -> Training | None:
    """Return the validation of a file by a journal, or by those of its folder; None if none has it.

    Raises UserError if ``journal`` cannot be read.
    """
    journals = [journal] if journal is not None else sorted(file.parent.glob(f"*{SUFFIX}"))
    written = [run for each in journals for run in (runs(each) if journal is not None else _readable(each))]
    for run in sorted(written, key=lambda run: run.time, reverse=True):
        step = _step(run, file, metadata, is_named=journal is not None)
        if step is not None:
            return _training(run, step)
    return None


def chosen_file(journal: Path) -> Path | None:
    """Return the model of a journal's newest run with the lowest validation loss, or else the newest that still exists.

    Raises UserError if the journal cannot be read.
    """
    newest = max(runs(journal), key=lambda run: run.time, default=None)
    if newest is None:
        return None
    best = newest.best_file()
    saved = [Path(str(line.get("file"))) for line in reversed(newest.of_kind("save"))]
    return next((file for file in ([best[0]] if best is not None else []) + saved if file.is_file()), None)


def runs(journal: Path) -> list[History]:
    """Return the runs of a journal. Raises UserError if it cannot be read."""
    reader = JournalReader(journal, History)
    reader.update()
    return [run for run in reader.runs.values() if isinstance(run, History)]


def _readable(journal: Path) -> list[History]:
    try:
        return runs(journal)
    except UserError:
        return []


def _step(run: History, file: Path, metadata: Mapping[str, str], is_named: bool) -> int | None:
    """Return the step at which a run has saved a file; None if it has not. A file may have been moved since."""
    for line in reversed(run.of_kind("save")):
        if Path(str(line.get("file"))).name == file.name and isinstance(line.get("step"), int):
            return int(line["step"])
    steps = metadata.get("ss_steps", "")
    return int(steps) if is_named and steps.isdecimal() else None


def _training(run: History, step: int) -> Training | None:
    known = run.evaluations()
    before = [each for each in known if each.step <= step]
    if not before:
        return None
    best = run.best_file()
    lowest = min(known, key=lambda each: each.loss)
    name = best[0].name if best is not None else ""
    return Training(step, before[-1], known[0], lowest, run.overfitting(), name)
