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

OVERFITTING = "over-fitting"
"""Name of the mark at which validation begins to rise while training falls."""

_MARKS = 400
"""Largest number of events of a kind below a chart."""

_SMOOTHED_SHARE = 50
"""A smoothed loss is the mean of a 50th of the steps, and of at least :attr:`RunLog.smoothing` steps."""

_HEADROOM = 1.3
"""Upper limit of a chart whose largest values are rare, relative to its 99th percentile."""

_RATES = 8
"""Largest number of learning rates in the chart of a run."""

Curve = Sequence[float]
LabelledCurve = tuple[str, str, int, Curve]
"""Label, style, number of the colour and values."""
Runs = Sequence[tuple[str, History]]
"""Runs with their labels."""


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

    def add(self, steps: Sequence[int], curves: Sequence[LabelledCurve]) -> None:
        """Add curves with values for the steps, reduced by the minima and maxima of the first."""
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


def charts(runs: Runs) -> dict[str, Chart]:
    """Return the charts of runs with their labels by name. Several runs share a chart, with a curve for each."""
    return {"loss": _loss(runs), "learning_rate": _learning_rates(runs), "seconds": _seconds(runs), "memory": _memory(runs)}


def _loss(runs: Runs) -> Chart:
    chart = Chart("Loss", has_log_scale=True)
    windows = [smoothing(run) for _, run in runs]
    means = [smoothed(run.losses, window) for (_, run), window in zip(runs, windows, strict=True)]
    if max(windows) > 1:
        chart.notes.append(_means(windows))
    if len(runs) > 1:
        for index, (label, run) in enumerate(runs):
            chart.add(run.steps, [(label, "line", index, means[index])])
        chart.scale([(f"{label}: ", run.steps, means[index]) for index, (label, run) in enumerate(runs)])
        return chart
    ((_, run),) = runs
    if any(map(math.isfinite, run.losses)):
        both: list[LabelledCurve] = [("loss", "faint", 0, run.losses), ("smoothed", "line", 0, means[0])]
        chart.add(run.steps, both if windows[0] > 1 else [("loss", "line", 0, run.losses)])
    if any(map(math.isfinite, run.preservation)):
        chart.add(run.steps, [("preservation", "line", 2, smoothed(run.preservation, windows[0]))])
    chart.scale([("", run.steps, run.losses)])
    chart.marks = list(_marks(run))
    if measured := run.evaluations():
        chart.add([each.step for each in measured], [("validation", "line", 1, [each.loss for each in measured])])
        if (began := run.overfitting()) is not None:
            chart.marks.append({"name": OVERFITTING, "steps": [began.step]})
    return chart


def _learning_rates(runs: Runs) -> Chart:
    """Return the chart of the learning rates, and for several runs of their first. A step with fewer rates repeats its last."""
    chart, most = Chart("Learning rate", from_zero=True), _RATES if len(runs) == 1 else 1
    for index, (label, run) in enumerate(runs):
        count = max(map(len, run.learning_rates), default=0)
        curves: list[LabelledCurve] = []
        for position in range(min(count, most)):
            values = [rates[min(position, len(rates) - 1)] if rates else math.nan for rates in run.learning_rates]
            name = label if len(runs) > 1 else f"group {position + 1}" if count > 1 else "learning rate"
            curves.append((name, "line", index + position, values))
        if curves:
            chart.add(run.steps, curves)
        if count > most:
            chart.notes = [f"The first {most} of {count} rates." if len(runs) == 1 else "The first of several rates of a run."]
    return chart


def _seconds(runs: Runs) -> Chart:
    chart = Chart("Seconds per step", "s", from_zero=True)
    if len(runs) == 1:
        ((_, run),) = runs
        chart.add(run.steps, [("step", "line", 0, run.seconds), ("waiting for data", "area", 1, run.data)])
        chart.scale([("", run.steps, run.seconds)])
        _add_level(chart, "predicted", number(_predicted(run).get("seconds_per_step")))
        return chart
    windows = [smoothing(run) for _, run in runs]
    means = [smoothed(run.seconds, window) for (_, run), window in zip(runs, windows, strict=True)]
    for index, (label, run) in enumerate(runs):
        chart.add(run.steps, [(label, "line", index, means[index])])
    chart.notes += [_means(windows)] if max(windows) > 1 else []
    chart.scale([(f"{label}: ", run.steps, means[index]) for index, (label, run) in enumerate(runs)])
    return chart


def _means(windows: Sequence[int]) -> str:
    return f"Smoothed: means of {' or '.join(map(str, sorted(set(windows))))} steps."


def _memory(runs: Runs) -> Chart:
    """Return the chart of the caching allocator's memory in GB, next to predictions and GPUs; empty without a GPU."""
    chart = Chart("GPU memory", "GB", from_zero=True)
    predictions = [number(_predicted(run).get("reserved"), 0.0) for _, run in runs]
    for index, (label, run) in enumerate(runs):
        columns = {name: [value / GB for value in values] for name, values in run.memory.items()}
        if not any(map(math.isfinite, columns["reserved"])):
            continue
        curves: list[LabelledCurve] = [(label, "line", index, columns["reserved"])]
        if len(runs) == 1:
            curves = [(name.replace("_", " "), "line", colour, values) for colour, (name, values) in enumerate(columns.items())]
        chart.add(run.steps, curves)
        prefix = f"{label} " if len(set(predictions)) > 1 else ""
        if predictions[index]:
            _add_level(chart, f"{prefix}predicted", predictions[index] / GB)
        _add_level(chart, "GPU", number((run.start.get("gpu") or {}).get("memory")) / GB)
    return chart


def _predicted(run: History) -> dict[str, Any]:
    return run.start.get("predicted") or {}


def _add_level(chart: Chart, label: str, value: float) -> None:
    level = {"label": label, "value": _rounded(value)}
    if math.isfinite(value) and level not in chart.levels:
        chart.levels.append(level)


def _marks(run: History) -> Iterator[dict[str, Any]]:
    steps: dict[str, dict[int, None]] = {}
    for event in run.events:
        kind, step = MARKED.get(str(event.get("kind"))), event.get("step")
        if kind is not None and isinstance(step, int):
            steps.setdefault(kind, {})[step] = None
    yield from ({"name": name, "steps": list(some)[-_MARKS:]} for name, some in steps.items())


def _rounded(value: float) -> float | None:
    """Return a value with five digits, which is exact enough for a chart; None if it is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
