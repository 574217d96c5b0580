"""Measure a command line, upstream's and other configurations within a time, judge an 8-bit base, and keep the results."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.console import progress
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, gpus, machine, step_time, tuned
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.result import Estimate
from kohya_ext.estimate.tuned import Tuned
from kohya_ext.installed_gpus import first_gpu
from kohya_ext.planning.alternatives import Search
from kohya_ext.planning.plan import normalized_config
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.speed.trial import LEAST_GAIN
from kohya_ext.tuning import base_judgement, child, rows
from kohya_ext.tuning.base_judgement import Judgement, NotComparableError
from kohya_ext.tuning.rows import Row
from kohya_ext.tuning.task import Task
from kohya_ext.units import gigabytes

#: The file of a record of losses, as `loss_record` names it; that module imports torch's patches.
_OUTPUTS = "outputs.pt"

#: The most seconds of one row, and the share of the time that estimates may take.
_ROW_SECONDS, _ESTIMATES = 240.0, 0.25

#: Seconds below which no row is started.
_LEAST_SECONDS = 20.0

#: Steps before the measured ones of upstream, which tries and records nothing.
_FIRST_OF_UPSTREAM = 5

Measure = Callable[[Checkout, CommandLine, Task, float], dict[str, Any]]


@dataclass
class Tuner:
    """A tune of one command line. ``report`` receives a line for each row."""

    checkout: Checkout
    command: CommandLine
    seconds: float
    report: Callable[[str], None]
    measure: Measure = child.measure
    clock: Callable[[], float] = time.monotonic
    rows: list[Row] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    """The GPU and its software, as a process describes them; empty before the first one has measured."""
    is_stopped: bool = False
    """Whether the user has stopped it."""
    _until: float = 0.0
    _shortest: float = 0.0
    """Seconds of the shortest process so far; later ones take about as long."""
    _is_judged: bool = False

    def run(self) -> None:
        """Measure until everything is measured, the time is over or the user stops it. Raises CommandError."""
        self._until = self.clock() + self.seconds
        typed, upstream = rows.typed(self.command), rows.upstream_of(self.command)
        try:
            # As typed first: its checks of the command line are better.
            for row in (typed, upstream):
                self._row(row)
            if upstream.measured is None:
                self.report("no time to measure upstream; repeat with more --minutes")
            candidates = list(self._candidates(is_failed=bool(typed.measured and typed.measured.failed)))
            for row in candidates:
                self._row(row)
                self._judge()
            if left := [row for row in candidates if row.measured is None]:
                self.report(f"no time for {len(left)} more configurations; --minutes 20 measures more")
            self._judge()
        except KeyboardInterrupt:
            self.is_stopped = True
            self.report("stopped; what was measured so far is kept")

    @property
    def best(self) -> Row | None:
        """The fastest row that is not upstream's; the command as typed, unless another one is faster by more than the noise.

        A configuration with an 8-bit base counts only if the command line has one, or if it was judged to be good enough.
        """
        usable = [row for row in self.rows if row.kind != "upstream" and _is_measured(row) and self._may_be_used(row)]
        best = next((row for row in usable if row.kind == "typed"), None)
        for row in usable:
            if best is None or _is_faster(row, best):
                best = row
        return best

    def _may_be_used(self, row: Row) -> bool:
        good = [judgement.precision for judgement in self.judgements if judgement.is_good]
        return row.kind == "typed" or tuned.base_of(row.command) in (None, tuned.base_of(self.command), *good)

    @property
    def _typed_has_8_bits(self) -> bool:
        return self.command.settings["base_precision"] is not None

    @property
    def _left(self) -> float:
        return self._until - self.clock()

    def _candidates(self, is_failed: bool) -> Iterator[Row]:
        """Yield the other configurations, the most promising first."""
        gpu = self._gpu()
        if gpu is None:
            return
        estimates_until = self.clock() + _ESTIMATES * self.seconds
        search = Search(
            self.checkout,
            self.command,
            int(self.machine["memory"]),
            gpu,
            lambda: self.clock() < min(estimates_until, self._until),
            only_faster=not is_failed,
        )
        try:
            with progress("searching for configurations that fit"):
                candidates = search.run()
        except UserError as error:
            self.report(f"no other configurations: {error}")
            return
        if not search.is_complete:
            self.report("not all configurations were estimated in this time; --minutes 20 estimates more")
        for candidate in candidates:
            predicted = _predicted(candidate.estimate, candidate.command, gpu)
            yield Row(candidate.name, "candidate", candidate.command, predicted=predicted)

    def _gpu(self) -> Gpu | None:
        if "gpu" not in self.machine and (here := first_gpu()) is not None:  # nothing fits so far
            self.machine = {"gpu": here.name, "memory": here.memory, "capability": str(here.capability or 0)}
        if "gpu" not in self.machine:
            return None
        memory = int(self.machine["memory"])
        return machine.of(self.machine["gpu"], memory) or gpus.typical(memory)

    def _row(self, row: Row) -> None:
        """Measure a row, if there is time."""
        if self.rows and self._left < max(_LEAST_SECONDS, self._shortest):
            return
        with contextlib.suppress(UserError):  # a script without estimates has no configuration that could be found again
            row.config = tuned.configuration(row.command)
        self.rows.append(row)
        first = _FIRST_OF_UPSTREAM if row.kind == "upstream" else Task.first
        # The first process checks the command line, and may have to cache latents.
        is_first = len(self.rows) == 1
        limit = self._left if is_first else min(_ROW_SECONDS, self._left)
        begun = self.clock()
        with child.folder() as folder, progress(f"measuring {row.name} (at most {limit / 60:.0f} min)"):
            result = self.measure(self.checkout, row.command, Task(str(folder), first=first, checks=is_first), limit)
        self._shortest = min(self._shortest or math.inf, self.clock() - begun)
        self.machine = self.machine or result.get("machine", {})
        row.measured = replace(rows.read_result(row.config, result), sd_scripts=self.checkout.version or "")
        self.report(f"{row.name}: {_summary(row)}")

    def _judge(self) -> None:
        """Judge an 8-bit base once, as soon as a row with one is the fastest."""
        without = [row for row in self.rows if row.kind != "upstream" and _is_measured(row) and not row.has_8_bit_base]
        faster = [
            row
            for row in self.rows
            if row.has_8_bit_base and _is_measured(row) and all(_is_faster(row, other) for other in without)
        ]
        if self._is_judged or not (faster or self._typed_has_8_bits):
            return
        self._is_judged = True
        if self._left < _LEAST_SECONDS:
            self.report("no time to judge the 8-bit base; repeat with more --minutes")
            return
        try:
            self.judgements = list(self._judged())
        except NotComparableError as error:
            self.report(f"the 8-bit base is not judged: {error}")

    def _judged(self) -> Iterator[Judgement]:
        plain = self.command.with_({"speed": "off", "selective_torch_compile": False})
        precisions = ("int8", "fp8") if float(self.machine.get("capability") or 0) >= 8.9 else ("int8",)
        with ExitStack() as stack:
            folder = stack.enter_context(child.folder())
            in_16_bits = plain.with_({"base_precision": None, "base_precision_cache": None, "int8_convolutions": False})
            if "base_precision" in in_16_bits.values:
                raise NotComparableError("a preset or the config file sets --base_precision; give it on the command line")
            task = Task(str(folder), "losses", checks=False, precisions=precisions)
            reference = self._losses(in_16_bits, task)
            with_convolutions = any(row.command.settings["int8_convolutions"] for row in self.rows if _is_measured(row))
            for base in (*precisions, *(["int8 --int8_convolutions"] if with_convolutions else [])):
                own = stack.enter_context(child.folder())
                task = Task(str(own), "losses", checks=False, reference=str(folder / _OUTPUTS))
                changes = {"base_precision": base.split()[0], "int8_convolutions": " " in base}
                judgement = base_judgement.judge(base, reference, self._losses(plain.with_(changes), task))
                for line in judgement.lines():
                    self.report(line)
                yield judgement

    def _losses(self, command: CommandLine, task: Task) -> dict[str, Any]:
        limit = min(_ROW_SECONDS, self._left)
        with progress("comparing losses with and without an 8-bit base"):
            return self.measure(self.checkout, command, task, limit)

    def keep(self) -> None:
        """Keep the measurements for `plan` and --preset auto, and correct the time model by them. Raises OSError."""
        if "gpu" in self.machine and (kept := self._runs()):
            self._correct()
            tuned.keep(tuned.machine(self.machine["gpu"]), kept)
        for judgement in self.judgements:
            tuned.keep_judgement(self.command, judgement.precision, judgement.is_good, judgement.loss)

    def all_runs(self) -> list[Tuned]:
        """Return what was measured now, and earlier on this machine."""
        new = self._runs()
        earlier = tuned.load(tuned.machine(self.machine["gpu"])) if "gpu" in self.machine else []
        return [*new, *(run for run in earlier if all(run.config != each.config for each in new))]

    def _runs(self) -> list[Tuned]:
        """Return what others can use: another failure than one of memory may be due to the time or a driver."""
        runs = [row.measured for row in self.rows if row.measured is not None and row.config]
        return [run for run in runs if not run.failed or run.does_not_fit]

    def _correct(self) -> None:
        """Keep how much longer steps took than predicted, as real runs do: without what --speed adds."""
        gpu = self._gpu()
        for row in self.rows:
            if gpu is None or row.kind == "upstream" or not _is_measured(row) or row.measured is None or row.measured.features:
                continue
            known = cache.find(self.checkout, normalized_config(row.command), row.command.settings.disable_patch)
            predicted = None if known is None else _predicted(Estimate(**known), row.command, gpu)
            if predicted is not None:
                machine.keep_ratio(self.machine["gpu"], row.measured.seconds / predicted)


def _predicted(estimate: Estimate, command: CommandLine, gpu: Gpu) -> float | None:
    """Return the seconds of an image by the GPU's rates; None if they are not known."""
    predicted = step_time.by_rates(estimate, command, gpu)
    return None if predicted is None else predicted.seconds / estimate.images


def _is_measured(row: Row) -> bool:
    return row.measured is not None and not row.measured.failed


def _is_faster(row: Row, other: Row) -> bool:
    """Return whether a row is faster than another one by more than the noise, as in the trial of --speed."""
    assert row.measured is not None and other.measured is not None  # noqa: PT018
    ours, theirs = row.measured, other.measured
    return ours.seconds * LEAST_GAIN < theirs.seconds and theirs.seconds - ours.seconds > (ours.spread + theirs.spread) / 2


def _summary(row: Row) -> str:
    measured = row.measured
    assert measured is not None
    if measured.failed:
        return measured.failed
    return f"{step_time.format_seconds(measured.seconds)} per image, {gigabytes(measured.reserved)} GB reserved"
