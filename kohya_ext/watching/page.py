"""A page of text about runs, and the phrases that it shares with the full-screen view."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kohya_ext.run.journal_reader import RunLog
from kohya_ext.run.step_times import format_duration
from kohya_ext.units import GB, format_size, gigabytes
from kohya_ext.watching.nvml import GpuStatus

COLOURS = {"RUNNING": "bold green", "DONE": "green", "STOPPED": "yellow", "FAILED": "bold red", "DEAD": "bold red"}

_EVENTS = 6
"""Number of events on a page."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*#@"


@dataclass(frozen=True)
class View:
    """A run as it is shown."""

    file: Path
    """The run's journal."""
    log: RunLog
    row: Mapping[str, Any]
    """:meth:`RunLog.summary`."""
    gpu: GpuStatus | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return bool(self.row["status"] == "RUNNING")


def page(views: Sequence[View], console: Console) -> RenderableType:
    """Return the page of all runs: in detail those that run and the newest, and one line for each of the others."""
    detailed = [view for index, view in enumerate(views) if index == 0 or view.is_running]
    others = [view.row for view in views if view not in detailed]
    parts: list[RenderableType] = []
    for view in detailed:
        parts += [Rule(style="dim")] if parts else []
        parts.append(_details(view, console))
    if others:
        table = Table.grid(padding=(0, 2))
        for row in others:
            table.add_row(status(row), str(row["name"]), steps(row), loss(row))
        parts += [Rule(style="dim"), table]
    return Group(*parts)


def _details(view: View, console: Console) -> RenderableType:
    log, row = view.log, view.row
    unicode = console.encoding.startswith("utf")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    width = max(console.width - 12, 20)
    table.add_row("steps", steps(row))
    if row["steps"]:
        done = round(min(width, 60) * min(row["step"] / row["steps"], 1))
        full, empty = ("━", "─") if unicode else ("#", ".")
        table.add_row("", Text.assemble((full * done, "green"), (empty * (min(width, 60) - done), "dim")))
    for name, text in (("time", _time(row)), ("memory", _memory(row)), ("GPU", gpu(view.gpu)), ("loss", loss(row))):
        if text:
            table.add_row(name, text)
    curve = log.loss_curve(min(width, 60))
    if len(curve) > 1:
        table.add_row("", Text(_curve(curve, _BLOCKS if unicode else _ASCII_BLOCKS), style="cyan"))
    for index, text in enumerate(profile(log)):
        table.add_row("" if index else "profile", text)
    for index, each in enumerate([*log.events][-_EVENTS:]):
        table.add_row("" if index else "events", Text(event(each), no_wrap=True, overflow="ellipsis"))
    return Group(title(row), table, *([] if (last := command(view)) is None else [last]))


def title(row: Mapping[str, Any]) -> Text:
    """Return name, status, script and the reason of an end."""
    text = Text.assemble((str(row["name"]), "bold"), "  ", status(row), f"  {row['script'] or ''}")
    if row["reason"]:
        text.append(f"  ({row['reason']})", style="dim")
    return text


def status(row: Mapping[str, Any]) -> Text:
    """Return the status in its colour."""
    return Text(row["status"], style=COLOURS.get(row["status"], "dim"))


def command(view: View) -> Text | None:
    """Return how to stop, resume or start a run; None if nothing is left to do."""
    last, row = view.row["next_command"], view.row
    if last:
        resumes = last == view.log.start.get("resume_command")
        return Text.assemble(("to resume:" if resumes else "to start it again:", "dim"), f"\n{last}", overflow="fold")
    if view.is_running and row["stop_file"]:
        return Text(f"to save and stop: Ctrl-C in its terminal, or create {row['stop_file']}", style="dim")
    return None


def steps(row: Mapping[str, Any]) -> str:
    """Return the progress in steps and epochs, and the time left."""
    if not row["step"] and row["status"] == "RUNNING":
        return "loading models and data"
    words = f"{row['step']:,}"
    if row["steps"]:
        words += f" of {row['steps']:,} ({row['step'] / row['steps']:.0%})"
    if row["epoch"] is not None:
        words += f", epoch {row['epoch']}" + (f" of {row['epochs']}" if row["epochs"] else "")
    if row["skipped"]:
        words += f", {row['skipped']} skipped"
    if row["seconds_left"] is not None:
        words += f", {format_duration(row['seconds_left'])} left"
    return words


def _time(row: Mapping[str, Any]) -> str:
    times = row["seconds_per_step"]
    if times["now"] is None:
        return ""
    median = f", median {times['median']:.3g}" if times["median"] is not None else ""
    predicted = f", predicted {times['predicted']:.3g}" if times["predicted"] is not None else ""
    data = f"; waiting for data {times['data']:.2g}" if times["data"] is not None else ""
    return f"{times['now']:.3g} s per step{median}{predicted}{data}"


def _memory(row: Mapping[str, Any]) -> str:
    memory = row["memory"]
    predicted = f"predicted {format_size(memory['predicted_reserved'])}" if memory["predicted_reserved"] else ""
    card = f"{row['gpu']}, {memory['gpu'] / GB:.1f} GB" if row["gpu"] and memory["gpu"] else ""
    if memory["peak_reserved"] is None:
        return ", ".join(filter(None, (predicted, card)))
    reserved, peak = gigabytes(memory["reserved"] or 0), format_size(memory["peak_reserved"])
    return ", ".join(filter(None, (f"{reserved} GB reserved, peak {peak}", predicted, card)))


def gpu(state: GpuStatus | None) -> str:
    """Return the state of a GPU; empty if it is not known."""
    if state is None:
        return ""
    limit = f" of {state.power_limit:.0f}" if state.power_limit is not None else ""
    parts = [
        f"{state.utilization:.0%} busy" if state.utilization is not None else "",
        f"{state.temperature} °C" if state.temperature is not None else "",
        f"{state.power:.0f}{limit} W" if state.power is not None else "",
        f"{gigabytes(state.memory_used)} GB used" if state.memory_used is not None else "",
        f"{format_size(state.others_memory)} of it by {others(state)}" if state.others_memory else "",
        f"slowed by {' and '.join(state.throttling)}" if state.throttling else "",
    ]
    return ", ".join(filter(None, parts))


def others(state: GpuStatus) -> str:
    """Return the names of the two largest other processes, and the number of the rest."""
    names = list(dict.fromkeys(process.name for process in state.others if process.memory))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def loss(row: Mapping[str, Any]) -> str:
    """Return the latest, smoothed and first loss."""
    values = row["loss"]
    if values["smoothed"] is None:
        return ""
    now = f"{values['now']:.4g} now, " if values["now"] is not None else ""
    means = f" (means of {values['smoothing']} steps)" if values["smoothing"] > 1 else ""
    return f"{now}{values['smoothed']:.4g} smoothed, {values['first']:.4g} at the start{means}"


def _curve(values: Sequence[float], blocks: str) -> str:
    """Return values as block characters; the lowest is the first block."""
    low, high = min(values), max(values)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def profile(log: RunLog) -> list[str]:
    """Return the verdict and the advice of the latest profile; empty without one."""
    line = log.profile
    if line is None:
        return []
    advice = [f"{'try ' if str(each).startswith('--') else ''}{each}" for each in line.get("advice") or ()]
    return [f"steps {line.get('first')} to {line.get('last')}: {line.get('verdict')}", *advice]


def event(line: Mapping[str, Any]) -> str:
    """Return an event with its time and step."""
    when = time.strftime("%H:%M:%S", time.localtime(line.get("time", 0)))
    kind, step = str(line.get("kind")).replace("_", " "), line.get("step")
    details = [Path(str(line["file"])).name] if line.get("file") else []
    details += [str(line[key]) for key in ("reason", "phase", "problem", "summary") if line.get(key)]
    if isinstance(size := line.get("bytes"), int):
        details.append(format_size(size))
    if isinstance(seconds := line.get("seconds"), float) and math.isfinite(seconds):
        details.append(f"{seconds:.2g} s")
    details += map(str, line.get("images") or [])
    return f"{when}  step {step}  {kind}: {', '.join(details)}" if details else f"{when}  step {step}  {kind}"
