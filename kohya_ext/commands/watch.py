"""Show progress, speed, memory, loss and events of runs.

Reads the journals that runs write to their output folders, while they train or afterwards, and changes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.live import Live

from kohya_ext.output import Console
from kohya_ext.run.journal_files import journals, no_journal, not_a_journal
from kohya_ext.run.journal_reader import JournalReader, RunLog
from kohya_ext.watching import nvml
from kohya_ext.watching.page import View, page
from kohya_ext.watching.terminal import turn_on_escape_sequences

_REFRESH = 1.0
"""Seconds between two reads of the journals."""


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
    runs = _Runs(arguments.places, nvml.connect())
    views = runs.read()
    if arguments.json:
        rows = [{**view.row, "gpu_now": None if view.gpu is None else asdict(view.gpu)} for view in views]
        print(json.dumps(rows, indent=1))
        return 0
    has_escapes = turn_on_escape_sequences()  # before the console looks for them, to choose its colours
    width = None if sys.stdout.isatty() else shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, emoji=False, width=width)  # names of runs may look like markup
    if not arguments.once and console.is_terminal:
        show = _show_full_screen if has_escapes and _has_textual() else _show_pages
        show(runs.read, views, console)
        views = runs.views
    console.print(page(views, console))
    return 0


def _has_textual() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("textual", "textual_plotext"))


def _show_full_screen(read: Callable[[], list[View]], views: list[View], console: Console) -> None:
    from kohya_ext.watching.screen import WatchApp

    WatchApp(read, views, _REFRESH).run()


def _show_pages(read: Callable[[], list[View]], views: list[View], console: Console) -> None:
    try:
        with Live(page(views, console), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(_REFRESH)
                live.update(page(read(), console), refresh=True)
    except KeyboardInterrupt:
        return


@dataclass
class _Runs:
    """The runs of some folders and journals."""

    places: Sequence[Path]
    gpus: nvml.Gpus | None
    views: list[View] = field(default_factory=list)
    """The views of the last :meth:`read`."""
    _readers: dict[Path, JournalReader] = field(default_factory=dict)

    def read(self) -> list[View]:
        """Read new lines, also of new journals; return the latest run of each journal, the newest first."""
        for file in journals(self.places):
            if file not in self._readers:
                self._readers[file] = JournalReader(file)
        logs: dict[Path, RunLog] = {}
        for file, reader in self._readers.items():
            reader.update()
            if reader.latest is not None:
                logs[file] = reader.latest
            elif file in self.places:
                raise not_a_journal(file)
        if not logs:
            raise no_journal(self.places)
        newest_first = sorted(logs.items(), key=lambda item: item[1].time, reverse=True)
        self.views = [self._view(file, log) for file, log in newest_first]
        return self.views

    def _view(self, file: Path, log: RunLog) -> View:
        row = log.summary()
        is_sampled = self.gpus is not None and row["status"] == "RUNNING"
        return View(file, log, row, self.gpus.status(log.start) if is_sampled and self.gpus is not None else None)
