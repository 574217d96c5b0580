"""The full-screen view of runs, with Textual and plotext.

A refresh reads new lines of the journals. Charts are drawn again only when a run has new lines.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.theme import Theme
from textual.widgets import DataTable, Footer, Static
from textual_plotext import PlotextPlot

from kohya_ext.errors import UserError
from kohya_ext.run.journal_reader import RunLog
from kohya_ext.run.step_times import format_duration
from kohya_ext.units import GB, format_size
from kohya_ext.watching import page
from kohya_ext.watching.nvml import GpuStatus
from kohya_ext.watching.page import View

_REST, _LONGEST = 30.0, 5.0
"""Smallest ratio of the time between two refreshes to the processor time of a refresh (3% of a core), up to these seconds."""

_POINTS = 240
"""Largest number of points of a curve."""

_SMOOTHED = 12
"""Number of points over which the smoothed loss is averaged."""

_OUTLIERS = 0.02
"""Share of the largest and of the smallest values that a chart of the loss may cut off."""

BLUE, GREY, ORANGE, GREEN, RED = (88, 166, 255), (96, 106, 122), (240, 160, 60), (80, 200, 120), (240, 90, 90)
_DARK, _LINE = "#0d1117", "#30363d"

_CLOSE = 0.6
"""Share of the GPU's memory from which on the chart shows its limit."""

_STATUS = {"RUNNING": GREEN, "DONE": BLUE, "STOPPED": ORANGE, "FAILED": RED, "DEAD": RED}


def _style(colour: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


_THEME = Theme(
    name="kohya_ext",
    primary=_style(BLUE),
    accent=_style(ORANGE),
    foreground="#d6dde6",
    background=_DARK,
    surface=_DARK,
    panel="#161b22",
)


# --- curves ----------------------------------------------------------------------------------------------------------


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

    def set_legend(self, title: str, *legend: tuple[str, tuple[int, int, int], str]) -> None:
        """Set the title and the legend: marks, their colours and meanings."""
        self.border_title = title
        self.border_subtitle = "  ".join(f"[{_style(colour)}]{mark}[/] {meaning}" for mark, colour, meaning in legend)

    def line(self, height: float, log: RunLog, colour: tuple[int, int, int]) -> None:
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


# --- panels ----------------------------------------------------------------------------------------------------------


def bar(width: int, *parts: tuple[float, str]) -> Text:
    """Return a bar of shares from 0 to 1 in their colours; the rest is dim."""
    text, used = Text(no_wrap=True), 0
    at = 0.0
    for share, style in parts:
        at += max(share, 0.0)
        cells = min(round(at * width), width) - used
        text.append("━" * max(cells, 0), style=style)
        used += max(cells, 0)
    return text.append("━" * (width - used), style=_style((50, 56, 66)))


def progress_panel(view: View, width: int) -> Text:
    """Return the title, the progress bar, and the time left."""
    row = view.row
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f" {row['status']} ", style=f"bold {_DARK} on {_style(_STATUS.get(row['status'], GREY))}")
    title.append(f"  {row['name']}", style="bold")
    for part in (row["script"], row["gpu"], row["host"], f"part {row['parts']}" if row["parts"] > 1 else None):
        if part:
            title.append(f"  {part}", style="dim")
    if row["reason"]:
        title.append(f"  {row['reason']}", style="red")
    lines = [title]
    if row["steps"]:
        share = min(row["step"] / row["steps"], 1.0)
        colour = _style(_STATUS.get(row["status"], GREY))
        lines.append(Text.assemble(bar(max(width - 6, 10), (share, colour)), (f"{share:>6.0%}", "bold")))
    words = page.steps(row)
    if row["seconds_left"] is not None:
        words += f", until {time.strftime('%a %H:%M', time.localtime(time.time() + row['seconds_left']))}"
    lines.append(Text(words, no_wrap=True, overflow="ellipsis"))
    return Text("\n").join(lines)


def _pairs(*pairs: tuple[str, str]) -> Table:
    """Return names and values in two columns of pairs, without empty values."""
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(2):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    shown = [pair for pair in pairs if pair[1]]
    for index in range(0, len(shown), 2):
        table.add_row(*shown[index], *(shown[index + 1] if index + 1 < len(shown) else ("", "")))
    return table


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def loss_panel(view: View) -> Iterator[Any]:
    """Yield the loss and the learning rate."""
    values, rates = view.row["loss"], view.row["learning_rates"] or []
    yield _pairs(
        ("now", _number(values["now"], ".4g")),
        ("mean", _number(values["smoothed"], ".4g")),
        ("first", _number(values["first"], ".4g")),
        ("rate", ", ".join(f"{rate:.3g}" for rate in rates[:2])),
    )


def time_panel(view: View, width: int) -> Iterator[Any]:
    """Yield the seconds per step and their parts."""
    times, log = view.row["seconds_per_step"], view.log
    if times["now"] is None:
        yield Text("no step yet", style="dim")
        return
    median = times["median"]
    recent = log.outside[max(log.part_began + 1, len(log.outside) - 1000) :]
    outside = sum(recent) / len(recent) if recent else 0.0
    yield _pairs(
        ("now", f"{times['now']:.3g} s"),
        ("median", _number(median, ".3g", " s")),
        ("predicted", _number(times["predicted"], ".3g", " s")),
    )
    whole = max((median or times["now"]) + outside, 1e-9)
    data = min(times["data"] or 0.0, whole)
    shares = (1 - (data + outside) / whole, data / whole, outside / whole)
    colours = (_style(GREEN), _style(ORANGE), _style(BLUE))
    yield bar(width, *zip(shares, colours, strict=True))
    legend = Text(no_wrap=True)
    for name, share, colour in zip(("step", "data", "saving"), shares, colours, strict=True):
        legend.append("■ ", style=colour).append(f"{name} {share:.0%} ", style="dim")
    yield legend


def memory_panel(view: View, width: int) -> Iterator[Any]:
    """Yield the reserved memory, its peak and prediction, and the size of the GPU."""
    memory = view.row["memory"]
    reserved, peak, predicted, total = (memory[name] for name in ("reserved", "peak_reserved", "predicted_reserved", "gpu"))
    if peak is None and predicted is None:
        return
    yield _pairs(*((name, format_size(size) if size else "") for name, size in (
        ("now", reserved), ("peak", peak), ("predicted", predicted), ("GPU", total)
    )))  # fmt: skip
    if total and peak:
        colour = RED if peak > 0.95 * total else ORANGE if peak > 0.85 * total else BLUE
        yield bar(width, ((reserved or 0) / total, _style(colour)), ((peak - (reserved or 0)) / total, _style(GREY)))


def gpu_panel(state: GpuStatus | None, width: int) -> Iterator[Any]:
    """Yield the state of the GPU as NVML reports it."""
    if state is None:
        return
    limit = f" of {state.power_limit:.0f}" if state.power_limit is not None else ""
    yield _pairs(
        ("busy", _number(state.utilization, ".0%")),
        ("used", format_size(state.memory_used) if state.memory_used is not None else ""),
        ("temp.", _number(state.temperature, "d", " °C")),
        ("power", _number(state.power, ".0f", f"{limit} W")),
    )
    if state.utilization is not None:
        yield bar(width, (state.utilization, _style(GREEN)))
    if state.others_memory:
        words = f"{format_size(state.others_memory)} by others: {page.others(state)}"
        yield Text(words, style=_style(ORANGE), no_wrap=True, overflow="ellipsis")
    if state.throttling:
        yield Text(
            f"slowed by {' and '.join(state.throttling)}", style=f"bold {_style(RED)}", no_wrap=True, overflow="ellipsis"
        )


def run_panel(view: View) -> Iterator[Any]:
    """Yield when the run started, its images and versions."""
    start, training = view.log.start, view.log.training
    began = start.get("time")
    images = training.get("images")
    yield _pairs(
        ("started", time.strftime("%a %H:%M", time.localtime(began)) if began else ""),
        ("images", f"{images:,}" if isinstance(images, int) else ""),
        ("sd-scripts", str(start.get("sd_scripts") or "").removeprefix("sd-scripts ")),
        ("torch", str(start.get("torch") or "")),
        ("kohya_ext", str(start.get("kohya_ext") or "")),
        ("processes", str(start.get("processes") or "")),
    )


def profile_line(view: View) -> str:
    """Return the limit and the options of the latest profile; empty without one."""
    line = view.log.profile
    if line is None or not line.get("limit"):
        return ""
    options = [str(each).split(" ")[0] for each in line.get("advice") or () if str(each).startswith("--")]
    return f"profile: limited by {line['limit']}" + (f"; try {', '.join(options)}" if options else "")


def _group(parts: Iterable[Any]) -> Any:
    from rich.console import Group

    return Group(*parts)


class RunTable(DataTable, can_focus=False):  # type: ignore[misc, call-arg]  # textual is not followed
    """The table of runs. Keys select a run through the application."""


# --- application -----------------------------------------------------------------------------------------------------


class WatchApp(App[None]):  # type: ignore[misc]  # textual is not followed
    """The full-screen view. It reads in :meth:`refresh_views` and writes nothing."""

    TITLE = "kohya_ext watch"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: ClassVar = [(0, "-narrow"), (140, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar = [(0, "-low"), (38, "-high")]
    BINDINGS: ClassVar = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q", priority=True),
        Binding("l", "scale", "Logarithmic loss"),
        Binding("c", "chart", "Next chart"),
        Binding("down,j,n", "select(1)", "Next run", key_display="↓"),
        Binding("up,k,p", "select(-1)", "Previous run", key_display="↑"),
    ]
    CSS = f"""
    #runs {{ display: none; height: auto; max-height: 9; border: round {_LINE}; padding: 0 1; background: {_DARK}; }}
    Screen.-several #runs {{ display: block; }}
    RunTable > .datatable--header {{ background: {_DARK}; color: #7d8590; text-style: none; }}
    RunTable > .datatable--even-row, RunTable > .datatable--odd-row {{ background: {_DARK}; }}
    RunTable > .datatable--cursor {{ background: #1f3a5f; text-style: none; }}
    #progress {{ height: 3; margin: 0 1; }}
    .panel, Chart {{ border: round {_LINE}; border-title-color: #7d8590; border-subtitle-color: #7d8590; padding: 0 1; }}
    Chart {{ padding: 0; }}
    .panel {{ height: auto; }}
    .panel.-empty, .-low #run-panel {{ display: none; }}
    .-low .panel {{ border: none; border-top: solid {_LINE}; }}
    #body {{ height: 1fr; }}
    #side {{ width: 38; height: 1fr; scrollbar-size: 0 0; }}
    .-wide #side {{ width: 46; }}
    #small {{ height: 0.6fr; display: none; }}
    .-wide.-high #small {{ display: block; }}
    #bottom {{ height: 6; }}
    .-low.-several #bottom {{ height: 4; }}
    .-low.-several #loss-panel {{ display: none; }}
    .-high #bottom {{ height: 11; }}
    #events, #command {{ width: 1fr; height: 1fr; }}
    #command {{ display: none; }}
    .-wide #command {{ display: block; }}
    #hint {{ height: auto; max-height: 3; margin: 0 1; color: #7d8590; }}
    .-wide #hint {{ display: none; }}
    """

    def __init__(self, read: Callable[[], list[View]], views: list[View], interval: float) -> None:
        """``read`` returns the current views; it is called every ``interval`` seconds."""
        super().__init__()
        self._read, self._views, self._interval = read, views, interval
        self._selected = views[0].file
        """The journal of the shown run."""
        self._logarithmic = False
        self._chart = 0
        """The chart in the large place if there is only one."""
        self._shown: object = None
        """What the panels show, to update them only when it changes."""
        self._next = 0.0
        """Time of the next refresh."""
        self._used: float | None = None
        """Processor time before the last refresh; None before the first one."""
        self._drawn: object = None
        """What the charts show, to draw them only when it changes."""

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        yield RunTable(id="runs", cursor_type="row", cursor_foreground_priority="renderable")
        yield Static(id="progress")
        with Horizontal(id="body"):
            with Vertical():
                yield Chart(id="main")
                with Horizontal(id="small"):
                    yield Chart(id="seconds")
                    yield Chart(id="memory")
            with VerticalScroll(id="side", can_focus=False):
                for name in _PANELS:
                    yield Static(id=f"{name}-panel", classes="panel")
        with Horizontal(id="bottom"):
            yield Static(id="events", classes="panel")
            yield Static(id="command", classes="panel")
        yield Static(id="hint")
        yield Footer()

    def on_mount(self) -> None:
        """Start the refreshes."""
        self.register_theme(_THEME)
        self.theme = _THEME.name
        for name in _PANELS:
            self.query_one(f"#{name}-panel").border_title = {"time": "time per step"}.get(name, name)
        self.query_one("#events").border_title = "events"
        self.query_one("#command").border_title = "next"
        self.query_one("#runs", RunTable).add_columns("run", "status", "progress", "left", "s per step", "loss")
        self.set_interval(self._interval, self.refresh_views)
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._drawn = None
        self.call_after_refresh(self.show)

    def refresh_views(self) -> None:
        """Read the journals and show them if they have changed."""
        used, now = time.process_time(), time.monotonic()
        if now < self._next:
            return
        self._next = now + min((used - (self._used or used)) * _REST, _LONGEST)
        self._used = used
        try:
            self._views = self._read()
        except UserError as problem:
            self.query_one("#hint", Static).update(Text(str(problem), style="red"))
            return
        shown = [(view.file, view.row["status"], view.log.time, len(view.log.steps), view.gpu) for view in self._views]
        if shown != self._shown:
            self._shown = shown
            self.show()

    def action_scale(self) -> None:
        """Switch the loss between a linear and a logarithmic scale."""
        self._logarithmic = not self._logarithmic
        self.show()

    def action_chart(self) -> None:
        """Show the next chart in the large place."""
        self._chart = (self._chart + 1) % 3
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is possible; Textual hides the keys of others."""
        return action != "select" or len(self._views) > 1

    def action_select(self, change: int) -> None:
        """Show the next or previous run."""
        files = [view.file for view in self._views]
        self._selected = files[(files.index(self._selected) + change) % len(files)]
        self.show()

    def on_data_table_row_selected(self, event: Any) -> None:
        """Show the run that the mouse has selected in the table."""
        if event.row_key.value is not None:
            self._selected = Path(event.row_key.value)
            self.show()

    # --- show --------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Show the current views."""
        view = next(view for view in self._views if view.file == self._selected)
        self._show_runs()
        self._show_panels(view)
        drawn = (self._selected, len(view.log.steps), view.log.time, self._logarithmic, self._chart, self.size)
        if drawn != self._drawn:
            self._drawn = drawn
            self._show_charts(view)

    def _show_runs(self) -> None:
        table = self.query_one("#runs", RunTable)
        self.screen.set_class(len(self._views) > 1, "-several")
        if len(self._views) < 2:
            return
        rows = [(str(view.file), _run_row(view)) for view in self._views]
        if [key.value for key in table.rows] != [name for name, _ in rows]:
            table.clear()
            for name, cells in rows:
                table.add_row(*cells, key=name)
        else:
            for index, (_, cells) in enumerate(rows):
                for column, cell in enumerate(cells):
                    if table.get_cell_at((index, column)) != cell:
                        table.update_cell_at((index, column), cell)
        table.move_cursor(row=[name for name, _ in rows].index(str(self._selected)))

    def _show_panels(self, view: View) -> None:
        progress = self.query_one("#progress", Static)
        progress.update(progress_panel(view, max(progress.size.width, 20)))
        for name, parts in (
            ("loss", loss_panel(view)),
            ("time", time_panel(view, self._width("time-panel"))),
            ("memory", memory_panel(view, self._width("memory-panel"))),
            ("GPU", gpu_panel(view.gpu, self._width("GPU-panel"))),
            ("run", run_panel(view)),
        ):
            panel, shown = self.query_one(f"#{name}-panel", Static), list(parts)
            panel.set_class(not shown, "-empty")
            panel.update(_group(shown))
        events = self.query_one("#events", Static)
        following, profile = page.command(view) or Text("nothing to do", style="dim"), profile_line(view)
        newest: list[Text] = [_event(line) for line in [*view.log.events][-max(events.content_size.height, 1) :]]
        events.update(_group(newest or [Text("none", style="dim")]))
        advice = [Text(line, style="bold" if not index else "") for index, line in enumerate(page.profile(view.log))]
        self.query_one("#command", Static).update(_group([*advice, *([Text()] if advice else []), following]))
        # Narrow terminals have no place for both.
        hint = profile if profile and view.is_running else " ".join(following.plain.splitlines())
        self.query_one("#hint", Static).update(Text(hint, overflow="fold"))

    def _width(self, name: str) -> int:
        return max(int(self.query_one(f"#{name}", Static).content_size.width), 10)

    def _show_charts(self, view: View) -> None:
        log, row = view.log, view.row
        draw: tuple[Callable[[Chart], None], ...] = (
            lambda chart: draw_loss(chart, log, self._logarithmic),
            lambda chart: draw_seconds(chart, log, row["seconds_per_step"]["predicted"]),
            lambda chart: draw_memory(chart, log, row["memory"]),
        )
        charts = [self.query_one(f"#{name}", Chart) for name in ("main", "seconds", "memory")]
        for index, chart in enumerate(charts):
            which = (index + self._chart) % 3
            if index and not self.query_one("#small").display:
                continue
            draw[which](chart)


_PANELS = ("loss", "time", "memory", "GPU", "run")


def _run_row(view: View) -> list[Any]:
    row = view.row
    share = row["step"] / row["steps"] if row["steps"] else 0.0
    left = format_duration(row["seconds_left"]) if row["seconds_left"] is not None else ""
    seconds, loss = row["seconds_per_step"]["median"], row["loss"]["smoothed"]
    return [
        Text(str(row["name"]), style="bold"),
        Text(row["status"], style=f"bold {_style(_STATUS.get(row['status'], GREY))}"),
        Text.assemble(bar(20, (share, _style(_STATUS.get(row["status"], GREY)))), f"{share:>5.0%}"),
        left,
        f"{seconds:.3g}" if seconds is not None else "",
        f"{loss:.4g}" if loss is not None else "",
    ]


def _event(line: Mapping[str, Any]) -> Text:
    colours = {
        "save": GREEN,
        "state": GREEN,
        "sample": BLUE,
        "skip": ORANGE,
        "out_of_memory": RED,
        "spill": RED,
        "stop": ORANGE,
    }
    text = Text(page.event(line), no_wrap=True, overflow="ellipsis")
    text.stylize("dim", 0, 8)
    kind = str(line.get("kind")).replace("_", " ")
    if (colour := colours.get(str(line.get("kind")))) is not None:
        begin = text.plain.find(f"  {kind}") + 2
        text.stylize(_style(colour), begin, begin + len(kind))
    return text
