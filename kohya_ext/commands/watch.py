"""Show progress, speed, memory, loss and events of runs.

Reads the journals that runs write to their output folders, while they train or afterwards, and changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kohya_ext.run.journal_files import journals, no_journal, not_a_journal
from kohya_ext.run.journal_reader import JournalReader, RunLog
from kohya_ext.run.step_times import format_duration
from kohya_ext.units import GB, format_size, gigabytes

_REFRESH = 1.0
"""Seconds between two reads of the journals."""

_EVENTS = 6
"""Number of events on a page."""

_COLOURS = {"RUNNING": "bold green", "DONE": "green", "STOPPED": "yellow", "FAILED": "bold red", "DEAD": "bold red"}

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*#@"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "places",
        nargs="*",
        type=Path,
        metavar="FOLDER|JOURNAL",
        help="output folders or journals; default: the current folder and `output`",
    )
    parser.add_argument("--once", action="store_true", help="print one page instead of a live view; the default in a pipe")
    parser.add_argument("--json", action="store_true", help="print JSON: times in seconds, memory in bytes")


def run(arguments: argparse.Namespace) -> int:
    """Show the runs until Ctrl-C, or print them and exit; return 0. Raises UserError without a journal."""
    readers: dict[Path, JournalReader] = {}
    logs = _read(arguments.places, readers)
    if arguments.json:
        print(json.dumps([log.summary() for log in logs], indent=1))
        return 0
    console = Console(highlight=False)
    if arguments.once or not console.is_terminal:
        console.print(page(logs, console))
        return 0
    try:
        with Live(page(logs, console), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_REFRESH)
                live.update(page(_read(arguments.places, readers), console), refresh=True)
    except KeyboardInterrupt:
        console.print(page(logs, console))
    return 0


def _read(places: Sequence[Path], readers: dict[Path, JournalReader]) -> list[RunLog]:
    """Read new lines, also of new journals; return the latest run of each journal, the newest first."""
    for file in journals(places):
        readers.setdefault(file, JournalReader(file))
    logs = []
    for file, reader in readers.items():
        reader.update()
        if reader.latest is not None:
            logs.append(reader.latest)
        elif file in places:
            raise not_a_journal(file)
    if not logs:
        raise no_journal(places)
    return sorted(logs, key=lambda log: log.time, reverse=True)


# --- page ------------------------------------------------------------------------------------------------------------


def page(logs: Sequence[RunLog], console: Console) -> RenderableType:
    """Return the page of all runs: in detail those that run and the newest, and one line for each of the others."""
    rows = [(log, log.summary()) for log in logs]
    detailed = [(log, row) for index, (log, row) in enumerate(rows) if index == 0 or row["status"] == "RUNNING"]
    others = [row for log, row in rows if all(log is not shown for shown, _ in detailed)]
    parts: list[RenderableType] = []
    for log, row in detailed:
        parts += [Rule(style="dim")] if parts else []
        parts.append(_details(log, row, console))
    if others:
        table = Table.grid(padding=(0, 2))
        for row in others:
            table.add_row(_status(row), str(row["name"]), _steps(row), _loss(row))
        parts += [Rule(style="dim"), table]
    return Group(*parts)


def _details(log: RunLog, row: Mapping[str, Any], console: Console) -> RenderableType:
    title = Text.assemble((str(row["name"]), "bold"), "  ", _status(row), f"  {row['script'] or ''}")
    if row["reason"]:
        title.append(f"  ({row['reason']})", style="dim")
    unicode = console.encoding.startswith("utf")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    width = max(console.width - 12, 20)
    table.add_row("steps", _steps(row))
    if row["steps"]:
        done = round(min(width, 60) * min(row["step"] / row["steps"], 1))
        full, empty = ("━", "─") if unicode else ("#", ".")
        table.add_row("", Text.assemble((full * done, "green"), (empty * (min(width, 60) - done), "dim")))
    for name, text in (("time", _time(row)), ("memory", _memory(row)), ("loss", _loss(row))):
        if text:
            table.add_row(name, text)
    curve = log.loss_curve(min(width, 60))
    if len(curve) > 1:
        table.add_row("", Text(_curve(curve, _BLOCKS if unicode else _ASCII_BLOCKS), style="cyan"))
    for index, event in enumerate([*log.events][-_EVENTS:]):
        table.add_row("" if index else "events", Text(_event(event), no_wrap=True, overflow="ellipsis"))
    parts: list[RenderableType] = [title, table]
    command = row["next_command"]
    if command:
        parts += [Text("to resume:" if command == log.start.get("resume_command") else "to start it again:", style="dim")]
        parts += [Text(str(command), overflow="fold")]
    elif row["status"] == "RUNNING" and row["stop_file"]:
        parts += [Text(f"to save and stop: Ctrl-C in its terminal, or create {row['stop_file']}", style="dim")]
    return Group(*parts)


def _status(row: Mapping[str, Any]) -> Text:
    return Text(row["status"], style=_COLOURS.get(row["status"], "dim"))


def _steps(row: Mapping[str, Any]) -> str:
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
    gpu = f"{row['gpu']}, {memory['gpu'] / GB:.1f} GB" if row["gpu"] and memory["gpu"] else ""
    if memory["peak_reserved"] is None:
        return ", ".join(filter(None, (predicted, gpu)))
    reserved, peak = gigabytes(memory["reserved"] or 0), format_size(memory["peak_reserved"])
    return ", ".join(filter(None, (f"{reserved} GB reserved, peak {peak}", predicted, gpu)))


def _loss(row: Mapping[str, Any]) -> str:
    loss = row["loss"]
    if loss["smoothed"] is None:
        return ""
    now = f"{loss['now']:.4g} now, " if loss["now"] is not None else ""
    means = f" (means of {loss['smoothing']} steps)" if loss["smoothing"] > 1 else ""
    return f"{now}{loss['smoothed']:.4g} smoothed, {loss['first']:.4g} at the start{means}"


def _curve(values: Sequence[float], blocks: str) -> str:
    """Return values as block characters; the lowest is the first block."""
    low, high = min(values), max(values)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


def _event(event: Mapping[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(event.get("time", 0)))
    kind, step = str(event.get("kind")).replace("_", " "), event.get("step")
    details = [Path(str(event["file"])).name] if event.get("file") else []
    details += [str(event[key]) for key in ("reason", "phase", "problem") if event.get(key)]
    if isinstance(size := event.get("bytes"), int):
        details.append(format_size(size))
    if isinstance(seconds := event.get("seconds"), float) and math.isfinite(seconds):
        details.append(f"{seconds:.2g} s")
    details += map(str, event.get("images") or [])
    return f"{when}  step {step}  {kind}: {', '.join(details)}" if details else f"{when}  step {step}  {kind}"
