"""The charts of a report, as plain data for uPlot: https://github.com/leeoniya/uPlot.

Long runs are reduced to the minimum and maximum of equal spans of steps, which draws the same as all steps. Smoothed curves are
computed from all steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kohya_ext.reporting.history import History, number
from kohya_ext.units import GB

SPANS = 1200
"""Largest number of spans of a curve."""

MARKED = {"save": "saved", "state": "saved", "resume": "resumed", "skip": "skipped", "spill": "spilled", "stop": "stopped"}
"""Kinds of events below the charts, and their names there."""

_MARKS = 400
"""Largest number of events of a kind below a chart."""

_SMOOTHED_SHARE = 50
"""A smoothed loss is the mean of a 50th of the steps, and of at least :attr:`RunLog.smoothing` steps."""

_HEADROOM = 1.3
"""Upper limit of a chart whose largest values are rare, relative to its 99th percentile."""

Curve = Sequence[float]


@dataclass
class Chart:
    """A chart of curves by step."""

    title: str
    unit: str = ""
    tables: list[list[list[float | None]]] = field(default_factory=list)
    """For each table the steps, then the values of each curve."""
    curves: list[dict[str, Any]] = field(default_factory=list)
    """Label, number of the colour and style of each curve: ``line``, ``area`` or ``faint``."""
    levels: list[dict[str, Any]] = field(default_factory=list)
    """Label and value of each horizontal line."""
    marks: list[dict[str, Any]] = field(default_factory=list)
    """Name and steps of events."""
    maximum: float | None = None
    """Upper limit of the chart; None for the largest value."""
    notes: list[str] = field(default_factory=list)
    """Sentences below the chart."""
    from_zero: bool = False
    has_log_scale: bool = False

    def add(self, steps: Sequence[int], curves: Sequence[tuple[str, str, int, Curve]]) -> None:
        """Add curves (label, style, number of the colour, values), reduced by the first one's minima and maxima."""
        if not steps:
            return
        kept = extremes(curves[0][3], SPANS)
        self.tables.append([[steps[index] for index in kept]])
        for label, style, colour, values in curves:
            self.tables[-1].append([_rounded(values[index]) for index in kept])
            self.curves.append({"label": label, "style": style, "colour": colour})

    def scale(self, rows: Sequence[tuple[str, Sequence[int], Curve]]) -> None:
        """Leave rare large values out of the scale; note them. Rows are prefixes of notes, steps and values."""
        finite = [sorted(filter(math.isfinite, values)) for _, _, values in rows]
        limits = [_limit(values) for values in finite if values]
        if not limits:
            return
        self.maximum = max(limits) if max(limits) < max(values[-1] for values in finite if values) else None
        if self.maximum is None:
            return
        for (prefix, steps, values), known in zip(rows, finite, strict=True):
            if known and known[-1] > self.maximum:
                above = [step for step, value in zip(steps, values, strict=True) if value > self.maximum]
                plural = "value is" if len(above) == 1 else "values are"
                largest = f"the largest, {known[-1]:.3g}, at step {steps[values.index(known[-1])]}"
                self.notes.append(f"{prefix}{len(above)} {plural} above the scale; {largest}.")


def _limit(values: Curve) -> float:
    """Return the upper limit of the scale for sorted values."""
    limit = values[math.ceil(len(values) * 0.99) - 1] * _HEADROOM
    return limit if len(values) >= 20 and 0 < limit < values[-1] else values[-1]


def extremes(values: Curve, spans: int) -> list[int]:
    """Return the indices of the minimum and maximum of each span, and the first and last index; all if they are few."""
    count = len(values)
    if count <= 2 * spans:
        return list(range(count))
    kept = {0, count - 1}
    for span in range(spans):
        indices = range(span * count // spans, (span + 1) * count // spans)
        finite = [index for index in indices if math.isfinite(values[index])]
        # A span without values is a gap in the curve.
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else {indices[0]}
    return sorted(kept)


def smoothed(values: Curve, window: int) -> list[float]:
    """Return the mean of each value and those before it, at most ``window``. Values that are not finite are left out.

    The first values are NaN until half a window is known.
    """
    total, count, means = 0.0, 0, []
    for index, value in enumerate(values):
        if math.isfinite(value):
            total, count = total + value, count + 1
        if index >= window and math.isfinite(old := values[index - window]):
            total, count = total - old, count - 1
        means.append(total / count if count and index + 1 >= window // 2 else math.nan)
    return means


def smoothing(run: History) -> int:
    """Return the number of losses in a mean of the smoothed curve."""
    return max(run.smoothing, len(run.losses) // _SMOOTHED_SHARE)


def charts(runs: Sequence[tuple[str, History]]) -> dict[str, Chart]:
    """Return the charts of runs with their labels by name. Several runs share a chart."""
    several = len(runs) > 1
    loss, rates = Chart("Loss", has_log_scale=True), Chart("Learning rate", from_zero=True)
    seconds, memory = Chart("Seconds per step", "s", from_zero=True), Chart("GPU memory", "GB", from_zero=True)
    losses: list[tuple[str, Sequence[int], Curve]] = []
    durations: list[tuple[str, Sequence[int], Curve]] = []
    for index, (label, run) in enumerate(runs):
        name, prefix = (label, f"{label}: ") if several else ("", "")
        window = smoothing(run)
        means = smoothed(run.losses, window)
        times: Curve = smoothed(run.seconds, window) if several else run.seconds
        losses.append((prefix, run.steps, means if several else run.losses))
        durations.append((prefix, run.steps, times))
        if any(map(math.isfinite, run.losses)):
            curves: list[tuple[str, str, int, Curve]] = [("loss", "faint", 0, run.losses), ("smoothed", "line", 0, means)]
            single = curves if window > 1 else [("loss", "line", 0, run.losses)]
            loss.add(run.steps, [(name, "line", index, means)] if several else single)
        _add_learning_rates(rates, index, name, run)
        _add_memory(memory, index, name, run)
        same = len({number(_predicted(each).get("reserved"), 0.0) for _, each in runs}) == 1
        _add_level(memory, "predicted" if same else f"{name} predicted", number(_predicted(run).get("reserved")) / GB)
        _add_level(memory, "GPU", number((run.start.get("gpu") or {}).get("memory")) / GB)
        if several:
            seconds.add(run.steps, [(name, "line", index, times)])
        else:
            seconds.add(run.steps, [("step", "line", 0, times), ("waiting for data", "area", 1, run.data)])
            _add_level(seconds, "predicted", number(_predicted(run).get("seconds_per_step")))
            loss.marks = list(_marks(run))
    windows = sorted({smoothing(run) for _, run in runs})
    if windows[-1] > 1:
        loss.notes.append(f"Smoothed: means of {' or '.join(map(str, windows))} steps.")
        seconds.notes += loss.notes if several else []
    loss.scale(losses)
    seconds.scale(durations)
    return {"loss": loss, "learning_rate": rates, "seconds": seconds, "memory": memory}


def _add_learning_rates(chart: Chart, index: int, name: str, run: History) -> None:
    """Add a curve for each learning rate, and for several runs the first. A step with fewer rates repeats its last."""
    count = max(map(len, run.learning_rates), default=0)
    curves: list[tuple[str, str, int, Curve]] = []
    for position in range(min(count, 1) if name else count):
        values = [rates[min(position, len(rates) - 1)] if rates else math.nan for rates in run.learning_rates]
        label = f"group {position + 1}" if count > 1 else "learning rate"
        curves.append((name or label, "line", index + position, values))
    if curves:
        chart.add(run.steps, curves)
    if count > 1 and name:
        chart.notes = ["The first of several rates of a run."]


def _add_memory(chart: Chart, index: int, name: str, run: History) -> None:
    if not any(map(math.isfinite, run.memory["reserved"])):
        return
    curves: list[tuple[str, str, int, Curve]] = [(name or "reserved", "line", index, _in_gb(run.memory["reserved"]))]
    if not name:
        curves.append(("peak allocated", "line", 1, _in_gb(run.memory["peak_allocated"])))
        curves.append(("allocated between steps", "line", 2, _in_gb(run.memory["allocated"])))
    chart.add(run.steps, curves)


def _predicted(run: History) -> dict[str, Any]:
    return run.start.get("predicted") or {}


def _in_gb(values: Curve) -> list[float]:
    return [value / GB for value in values]


def _add_level(chart: Chart, label: str, value: float) -> None:
    level = {"label": label, "value": _rounded(value)}
    if math.isfinite(value) and level not in chart.levels:
        chart.levels.append(level)


def _marks(run: History) -> Iterator[dict[str, Any]]:
    steps: dict[str, list[int]] = {}
    for event in run.events:
        kind, step = MARKED.get(str(event.get("kind"))), event.get("step")
        if kind is not None and isinstance(step, int) and step not in steps.setdefault(kind, []):
            steps[kind].append(step)
    yield from ({"name": name, "steps": some[-_MARKS:]} for name, some in steps.items())


def _rounded(value: float) -> float | None:
    """Return a value with five digits, which is exact enough for a chart; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
