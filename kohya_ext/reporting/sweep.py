"""Compare the runs of a sweep by their validation losses."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from kohya_ext.config.settings import HIDDEN
from kohya_ext.errors import UserError
from kohya_ext.reporting import file_training
from kohya_ext.reporting.history import History
from kohya_ext.run.evaluations import Evaluation


@dataclass(frozen=True)
class Row:
    """A run of a sweep."""

    name: str
    run: History | None
    """None if it has not begun."""

    @property
    def lowest(self) -> Evaluation | None:
        """The validation with the lowest loss."""
        return min(self.run.evaluations(), key=lambda each: each.loss, default=None) if self.run is not None else None


def newest_run(journal: Path) -> History | None:
    """Return the newest run of a journal; None if there is none."""
    try:
        return max(file_training.runs(journal), key=lambda run: run.time, default=None)
    except UserError:
        return None


def is_finished(journal: Path, steps: int | None) -> bool:
    """Return whether a journal's newest run has ended as planned, at as many steps as are wanted or early."""
    run = newest_run(journal)
    if run is None or run.status(time.time()) != "DONE":
        return False
    return steps is None or run.total in (None, steps)


def changed(journal: Path, values: Mapping[str, object]) -> list[str]:
    """Return the options whose values are not those of a journal's newest run, as far as it has them."""
    run = newest_run(journal)
    settings = run.start.get("settings") if run is not None else None
    if not isinstance(settings, dict):
        return []
    before = {key: row[0] for key, row in settings.items() if isinstance(row, list) and row}
    now = json.loads(json.dumps(values, default=str))
    return sorted(key for key in before.keys() | now if before.get(key) not in (now.get(key), HIDDEN))


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Return the runs with the lowest validation loss first, and those without one last."""
    return sorted(rows, key=lambda row: (row.lowest is None, row.lowest.loss if row.lowest is not None else 0.0))


def table(rows: Sequence[Row]) -> Table:
    """Return a row for each run, the best first, with the difference from it and that difference's standard error."""
    drawn = Table()
    drawn.add_column("run", overflow="fold")
    for title in ("steps", "validation loss", "at step", "above the best", "training loss", "status"):
        drawn.add_column(title, justify="right")
    order = ranked(rows)
    best = order[0].lowest if order else None
    for row in order:
        drawn.add_row(row.name, *_cells(row, best))
    return drawn


def _cells(row: Row, best: Evaluation | None) -> list[str]:
    run, lowest = row.run, row.lowest
    if run is None:
        return ["", "", "", "", "", "not begun"]
    loss, step, above = "", "", ""
    if lowest is not None and best is not None:
        loss, step = f"{lowest.loss:.4g}", str(lowest.step)
        change, error = lowest.change_from(best)
        above = "" if lowest == best else f"{change / best.loss:.1%} ± {error / best.loss:.1%}"
    smoothed = run.smoothed_loss()
    training = "" if smoothed is None else f"{smoothed:.4g}"
    return [str(run.step), loss, step, above, training, run.status(time.time()).lower()]


def verdict(rows: Sequence[Row]) -> str:
    """Return a sentence on the best run."""
    order = [row for row in ranked(rows) if row.lowest is not None]
    if not order or order[0].lowest is None:
        return "no run was validated, so the runs cannot be compared"
    best, lowest = order[0], order[0].lowest
    equal = []
    for row in order[1:]:
        assert row.lowest is not None
        change, error = row.lowest.change_from(lowest)
        equal += [row.name] if change <= 2 * error else []
    text = f"best: {best.name}, with a validation loss of {lowest.loss:.4g} at step {lowest.step}"
    text += "" if lowest.held_out else " of training images, which measures memorisation only partly"
    return f"{text}; not clearly worse: {', '.join(equal)}" if equal else text
