"""Panels of the full-screen view, as rich text."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from kohya_ext.run.step_times import format_duration
from kohya_ext.units import format_size
from kohya_ext.watching import colours, page
from kohya_ext.watching.colours import BLUE, GREEN, GREY, ORANGE, RED, style
from kohya_ext.watching.nvml import GpuStatus
from kohya_ext.watching.page import View

_EVENTS = {
    "save": GREEN,
    "state": GREEN,
    "sample": BLUE,
    "skip": ORANGE,
    "out_of_memory": RED,
    "spill": RED,
    "stop": ORANGE,
    "warning": ORANGE,
}
"""Colours of kinds of events."""


def bar(width: int, *parts: tuple[float, str]) -> Text:
    """Return a bar of shares from 0 to 1 in their colours; the rest is dim."""
    text, used, end = Text(no_wrap=True), 0, 0.0
    for share, colour in parts:
        end += max(share, 0.0)
        cells = max(min(round(end * width), width) - used, 0)
        text.append("━" * cells, style=colour)
        used += cells
    return text.append("━" * (width - used), style=style(colours.EMPTY))


def progress_panel(view: View, width: int) -> Text:
    """Return the title, the progress bar, and the time left."""
    row = view.row
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f" {row['status']} ", style=f"bold {colours.BACKGROUND} on {colours.of_status(row['status'])}")
    title.append(f"  {row['name']}", style="bold")
    for part in (row["script"], row["gpu"], row["host"], f"part {row['parts']}" if row["parts"] > 1 else None):
        if part:
            title.append(f"  {part}", style="dim")
    if row["reason"]:
        title.append(f"  {row['reason']}", style="red")
    lines = [title]
    if row["steps"]:
        share = min(row["step"] / row["steps"], 1.0)
        colour = colours.of_status(row["status"])
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
        cells = (*shown[index], *(shown[index + 1] if index + 1 < len(shown) else ("", "")))
        table.add_row(*map(Text, cells))  # names may look like markup
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
    colours = (style(GREEN), style(ORANGE), style(BLUE))
    yield bar(width, *zip(shares, colours, strict=True))
    legend = Text(no_wrap=True)
    for name, share, colour in zip(("step", "data", "saving"), shares, colours, strict=True):
        legend.append("■ ", style=colour).append(f"{name} {share:.0%} ", style="dim")
    yield legend
    if view.row["slowest_rank"]:
        yield Text(f"slowest: {view.row['slowest_rank']}", style="dim", no_wrap=True, overflow="ellipsis")


def memory_panel(view: View, width: int) -> Iterator[Any]:
    """Yield the reserved memory, its peak and prediction, and the size of the GPU."""
    memory = view.row["memory"]
    for row in view.row["ranks"][1:]:
        size = row.get("cuda_reserved", row.get("host_resident", 0))
        yield Text(f"rank {row['rank']} on {row['host']}: peak {format_size(size)}", style="dim", no_wrap=True)
    reserved, peak, predicted, total = (memory[name] for name in ("reserved", "peak_reserved", "predicted_reserved", "gpu"))
    if peak is None and predicted is None:
        return
    yield _pairs(*((name, format_size(size) if size else "") for name, size in (
        ("now", reserved), ("peak", peak), ("predicted", predicted), ("GPU", total)
    )))  # fmt: skip
    if total and peak:
        colour = RED if peak > 0.95 * total else ORANGE if peak > 0.85 * total else BLUE
        yield bar(width, ((reserved or 0) / total, style(colour)), ((peak - (reserved or 0)) / total, style(GREY)))


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
        yield bar(width, (state.utilization, style(GREEN)))
    if state.others_memory:
        words = f"{format_size(state.others_memory)} by others: {page.others(state)}"
        yield Text(words, style=style(ORANGE), no_wrap=True, overflow="ellipsis")
    if state.throttling:
        yield Text(f"slowed by {' and '.join(state.throttling)}", style=f"bold {style(RED)}", no_wrap=True, overflow="ellipsis")


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


def run_row(view: View) -> list[Any]:
    """Return the cells of a run in the table of runs."""
    row = view.row
    share = row["step"] / row["steps"] if row["steps"] else 0.0
    left = format_duration(row["seconds_left"]) if row["seconds_left"] is not None else ""
    seconds, loss = row["seconds_per_step"]["median"], row["loss"]["smoothed"]
    return [
        Text(str(row["name"]), style="bold"),
        Text(row["status"], style=f"bold {colours.of_status(row['status'])}"),
        Text.assemble(bar(20, (share, colours.of_status(row["status"]))), f"{share:>5.0%}"),
        left,
        f"{seconds:.3g}" if seconds is not None else "",
        f"{loss:.4g}" if loss is not None else "",
    ]


def event(line: Mapping[str, Any]) -> Text:
    """Return an event, its kind in colour."""
    text = Text(page.event(line), no_wrap=True, overflow="ellipsis")
    text.stylize("dim", 0, 8)
    kind = str(line.get("kind")).replace("_", " ")
    if (colour := _EVENTS.get(str(line.get("kind")))) is not None:
        begin = text.plain.find(f"  {kind}") + 2
        text.stylize(style(colour), begin, begin + len(kind))
    return text
