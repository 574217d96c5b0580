"""Keep all that a journal has on a run, for its report: more columns and events than :class:`RunLog`, and all parts."""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.run import evaluations
from kohya_ext.run.evaluations import Evaluation
from kohya_ext.run.journal_lines import PRESERVATION_LOSS
from kohya_ext.run.journal_reader import RunLog
from kohya_ext.run.output_files import BEST

MEMORY = ("reserved", "peak_allocated", "allocated")
"""The columns of memory in bytes."""


@dataclass
class History(RunLog):
    """The lines of a run. Columns have a value for each of :attr:`steps`; NaN if it is not known."""

    events: deque[dict[str, Any]] = field(default_factory=deque)
    """All events."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """The ``start`` line of each process."""
    data: array[float] = field(default_factory=lambda: array("d"))
    """Seconds in which each step has waited for images."""
    preservation: array[float] = field(default_factory=lambda: array("d"))
    """The loss of --output_preservation of each step."""
    memory: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in MEMORY})
    """Bytes by name of :data:`MEMORY`."""
    learning_rates: list[tuple[float, ...]] = field(default_factory=list)
    """The different learning rates of each step."""
    loading: float = 0.0
    """Seconds between the start of each process and its first step."""
    elapsed: float = 0.0
    """Seconds from the first to the last line of each process, added up."""
    checks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> its latest ``check`` event."""
    _is_loading: bool = False
    """Whether the process has not finished a step."""

    def add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        before = self.time
        super().add(line)
        kind = line.get("kind")
        if kind == "start":
            self.starts.append(line)
            self._is_loading = True
        else:
            self.elapsed += max(self.time - before, 0.0)
        if kind == "training":
            self.loading += max(self.time - number(self.start.get("time"), self.time), 0.0)
        elif kind == "check":
            self.checks[str(line.get("file"))] = line

    def _add_step(self, line: dict[str, Any]) -> None:
        super()._add_step(line)
        if self.last is not line:
            return
        if self._is_loading:
            self.outside[-1] = 0.0  # counted in loading
            self._is_loading = False
        index = len(self.steps) - 1
        if index < len(self.data):  # resumed from a state before the last step
            del self.learning_rates[index:]
            for column in (self.data, self.preservation, *self.memory.values()):
                del column[index:]
        self.data.append(number(line.get("data")))
        self.preservation.append(number(line.get(PRESERVATION_LOSS)))
        for name, sizes in self.memory.items():
            sizes.append(number(line.get(name)))
        rates = line.get("learning_rates")
        self.learning_rates.append(tuple(map(number, rates)) if isinstance(rates, list) else ())

    @property
    def began(self) -> float:
        """Time of the first line, seconds since 1970."""
        return number(self.starts[0].get("time"), self.time) if self.starts else self.time

    @property
    def saving(self) -> float:
        """Seconds in which models and states were written."""
        return sum(number(line.get("seconds"), 0.0) for line in self.of_kind("save", "state"))

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of some kinds."""
        return [line for line in self.events if line.get("kind") in kinds]

    def evaluations(self) -> list[Evaluation]:
        """Return the validations in order."""
        return evaluations.of_lines(self.of_kind(evaluations.KIND))

    def overfitting(self) -> Evaluation | None:
        """Return the validation at which over-fitting began; None if it did not."""
        return evaluations.overfitting(self.evaluations(), self.steps, self.losses)

    def best_file(self) -> tuple[Path, Evaluation] | None:
        """Return the saved model with the lowest validation loss of its step, and that; None if no step has both.

        A best model of --early_stopping that has been removed since is left out, and so are averages of --ema, which were not
        validated.
        """
        losses = {each.step: each for each in self.evaluations()}
        models = {str(line.get("file")) for line in self.of_kind("save")}
        lines = [line for line in self.of_kind("save") if _averaged(str(line.get("file"))) not in models]
        latest = max((number(line.get("step"), 0.0) for line in lines if BEST in str(line.get("file"))), default=0.0)
        kept = [line for line in lines if BEST not in str(line.get("file")) or line.get("step") == latest]
        saved = {line.get("step"): str(line.get("file")) for line in kept}
        both = [(Path(saved[step]), each) for step, each in losses.items() if step in saved]
        return min(both, key=lambda pair: pair[1].loss, default=None)

    def samples(self) -> list[dict[str, Any]]:
        """Return the ``sample`` events in the order of their steps; a file that was written twice counts once."""
        latest = {str(line.get("file")): line for line in self.of_kind("sample")}
        return sorted(latest.values(), key=lambda line: (number(line.get("step"), 0.0), Path(str(line.get("file"))).name))


def _averaged(file: str) -> str:
    """Return the model of which a file is the average, if it is one: ``cat`` for ``cat-ema``."""
    path = Path(file)
    return str(path.with_name(f"{path.stem.removesuffix('-ema')}{path.suffix}")) if path.stem.endswith("-ema") else ""


def number(value: object, otherwise: float = math.nan) -> float:
    """Return a number of a journal; ``otherwise`` for any other value, also a boolean."""
    return value if type(value) is float else float(value) if type(value) is int else otherwise
