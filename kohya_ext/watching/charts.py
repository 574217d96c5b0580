"""Charts of the full-screen view, drawn with plotext."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from textual_plotext import PlotextPlot

from kohya_ext.run.journal_reader import RunLog
from kohya_ext.units import GB
from kohya_ext.watching.colours import BLUE, GREEN, GREY, ORANGE, RED, Colour, style

_POINTS = 240
"""Largest number of points of a curve."""

_SMOOTHED = 12
"""Number of points over which the smoothed loss is averaged."""

_OUTLIERS = 0.02
"""Share of the largest and of the smallest values that a chart of the loss may cut off."""

_CLOSE = 0.6
"""Share of the GPU's memory from which on the chart shows its limit."""


def buckets(log: RunLog, points: int = _POINTS) -> list[tuple[int, int]]:
    """Return at most ``points`` ranges of indices that divide the steps of a run."""
    count = len(log.steps)
    points = min(points, count)
    return [(index * count // points, (index + 1) * count // points) for index in range(points)]


def smoothed(values: Sequence[float], width: int = _SMOOTHED) -> list[float]:
    """Return the mean of each value and up to ``width`` - 1 values before it; NaN stays NaN."""
    means: list[float] = []
    for index in range(len(values)):
        finite = [value for value in values[max(index + 1 - width, 0) : index + 1] if math.isfinite(value)]
        means.append(statistics.fmean(finite) if finite else math.nan)
    return means


def limits(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the range of values without outliers; None without values."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return None
    cut = int(len(ordered) * _OUTLIERS)
    low, high = ordered[cut], ordered[-1 - cut]
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _finite_mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


class Chart(PlotextPlot):  # type: ignore[misc]  # textual is not followed
    """A chart over the steps of a run."""

    def prepare(self, log: RunLog) -> Any:
        """Clear the chart, set its horizontal axis and return the plot."""
        plot = self.plt
        plot.clear_figure()
        first, last = (log.steps[0], log.steps[-1]) if log.steps else (0, 1)
        ticks = sorted({first + (last - first) * index // 4 for index in range(5)})
        plot.xticks(ticks, [f"{tick:,}" for tick in ticks])
        plot.xlim(first, max(last, first + 1))
        plot.grid(False, False)
        plot.xaxes(True, False)
        plot.yaxes(True, False)
        return plot

    def set_legend(self, title: str, *legend: tuple[str, Colour, str]) -> None:
        """Set the title and the legend: marks, their colours and meanings."""
        self.border_title = title
        self.border_subtitle = "  ".join(f"[{style(colour)}]{mark}[/] {meaning}" for mark, colour, meaning in legend)

    def line(self, height: float, log: RunLog, colour: Colour) -> None:
        """Draw a horizontal line."""
        self.plt.plot([log.steps[0], log.steps[-1]], [height, height], color=colour, marker="braille")


def _set_ticks(plot: Any, low: float, high: float, count: int = 4) -> None:
    ticks = [low + (high - low) * index / (count - 1) for index in range(count)]
    plot.ylim(low, high)
    plot.yticks(ticks, [f"{tick:.3g}" for tick in ticks])


def draw_loss(chart: Chart, log: RunLog, logarithmic: bool) -> None:
    """Draw the loss of single steps as points and their smoothed means as a line."""
    chart.set_legend("loss, logarithmic" if logarithmic else "loss", ("·", GREY, "single steps"), ("━", BLUE, "mean"))
    plot, parts = chart.prepare(log), buckets(log)
    raw = [(log.steps[end - 1], log.losses[end - 1]) for _, end in parts]
    means = smoothed([_finite_mean(log.losses[begin:end]) for begin, end in parts])

    def scaled(value: float) -> float:
        return value if not logarithmic else math.log10(value) if value > 0 else math.nan

    points = [(step, height) for step, value in raw if math.isfinite(height := scaled(value))]
    curve = [(step, height) for (step, _), mean in zip(raw, means, strict=True) if math.isfinite(height := scaled(mean))]
    extent = limits(height for _, height in [*points, *curve])
    if extent is not None:
        _set_ticks(plot, *extent)
        if logarithmic:
            ticks = [extent[0] + (extent[1] - extent[0]) * index / 3 for index in range(4)]
            plot.yticks(ticks, [f"{10**tick:.3g}" for tick in ticks])
        within = [(step, height) for step, height in points if extent[0] <= height <= extent[1]]
        if within:
            plot.scatter(*zip(*within, strict=True), color=GREY, marker="braille")
        plot.plot(*zip(*curve, strict=True), color=BLUE, marker="braille")
    chart.refresh()


def draw_seconds(chart: Chart, log: RunLog, predicted: float | None) -> None:
    """Draw the median seconds per step, and the prediction."""
    chart.set_legend("seconds per step", *([("━", GREEN, "predicted")] if predicted else []))
    plot = chart.prepare(log)
    curve = [
        (log.steps[end - 1], statistics.median(finite))
        for begin, end in buckets(log)
        if (finite := [value for value in log.seconds[begin:end] if math.isfinite(value)])
    ]
    if curve:
        _, usual = limits(height for _, height in curve) or (0.0, 1.0)
        _set_ticks(plot, 0.0, max(usual, predicted or 0.0) * 1.15, count=3)
        if predicted:
            chart.line(predicted, log, GREEN)
        plot.plot(*zip(*curve, strict=True), color=ORANGE, marker="braille")
    chart.refresh()


def draw_memory(chart: Chart, log: RunLog, memory: Mapping[str, Any]) -> None:
    """Draw the reserved memory in GB, the prediction, and the size of the GPU if it is close."""
    plot, legend = chart.prepare(log), []
    curve = [(log.steps[end - 1], max(log.reserved[begin:end]) / GB) for begin, end in buckets(log)]
    if any(height for _, height in curve):
        total, predicted = memory["gpu"], memory["predicted_reserved"]
        highest = max([*(height for _, height in curve), (predicted or 0) / GB])
        is_close = bool(total) and highest > _CLOSE * total / GB
        _set_ticks(plot, 0.0, (total / GB if is_close else highest) * 1.15, count=3)
        if predicted:
            chart.line(predicted / GB, log, GREEN)
            legend.append(("━", GREEN, "predicted"))
        if is_close:
            legend.append(("━", RED, "GPU"))
            chart.line(total / GB, log, RED)
        plot.plot(*zip(*curve, strict=True), color=BLUE, marker="braille")
    chart.set_legend("reserved memory, GB", *legend)
    chart.refresh()
