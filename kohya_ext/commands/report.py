"""Write a report on runs as one HTML file.

It has charts, samples, settings and events. Reads the journals of one or several runs, while they train or afterwards.
Several runs are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.reporting import page
from kohya_ext.reporting.history import History
from kohya_ext.reporting.similarity import ImageModel
from kohya_ext.reporting.thumbnails import Thumbnails
from kohya_ext.run.atomic_write import WriteError, write_atomically
from kohya_ext.run.journal import SUFFIX
from kohya_ext.run.journal_files import DEFAULT_FOLDERS, journals, no_journal, not_a_journal
from kohya_ext.run.journal_reader import JournalReader

_REFRESH = 15.0
"""Seconds between two reports with ``--live``."""

_SUFFIXES = (".html", ".htm")

_SHARE = 20
"""Time between two reports as a multiple of the time to write one, so that training is not slowed down."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "places",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="journals, or folders whose newest run is meant; default: the newest run in the current folder and in `output`",
    )
    parser.add_argument("--all", action="store_true", help="report on all runs of each folder and journal")
    parser.add_argument("--live", action="store_true", help="rewrite the report while a run trains")
    parser.add_argument(
        "--image_model",
        type=lambda folder: ImageModel(Path(folder)),
        metavar="FOLDER",
        help="compare samples with the run's images by this vision model of transformers, such as CLIP or DINOv2",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: NAME.report.html in the folder of the journal")


def run(arguments: argparse.Namespace) -> int:
    """Write the report, with ``--live`` until no run trains; return 0.

    Raises UserError without a run, Jinja2 or the given image model.
    """
    if arguments.output is not None and arguments.output.suffix.lower() not in _SUFFIXES:
        raise UserError(f"--output {arguments.output}: the name must end in .html")
    if arguments.image_model is not None:
        arguments.image_model.load()
    readers: dict[Path, JournalReader] = {}
    thumbnails = Thumbnails()
    shown = False
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            began = time.perf_counter()
            runs = _read(arguments.places, readers, arguments.all)
            now = time.time()
            live = arguments.live and any(run.status(now) == "RUNNING" for run in runs)
            file = arguments.output or _default_file(runs, readers)
            _write(file, page.html(runs, thumbnails, now, _REFRESH if live else None, arguments.image_model))
            if not shown:
                note(f"report: {file.resolve()}" + ("; Ctrl-C ends the report, not the run" if live else ""))
            shown = True
            if not live:
                break
            time.sleep(max(_REFRESH, _SHARE * (time.perf_counter() - began)))
    return 0


def write(*journals: Path, output: Path | None = None) -> Path:
    """Write the report on the newest run of each journal, by default into its folder; return the file.

    Raises UserError without a run.
    """
    readers: dict[Path, JournalReader] = {}
    runs = _read(journals, readers, every=False)
    file = output or _default_file(runs, readers)
    _write(file, page.html(runs, Thumbnails(), time.time(), None))
    return file.resolve()


def _read(places: Sequence[Path], readers: dict[Path, JournalReader], every: bool) -> list[History]:
    """Read new lines; return the newest run of each place, or every run, the oldest first. Raises UserError without a run."""
    runs: dict[int, History] = {}
    for group in [[place] for place in places] or [[*DEFAULT_FOLDERS]]:
        logs = [run for file in journals(group if places else []) for run in _runs(file, readers)]
        if not logs:
            raise not_a_journal(group[0]) if group[0].is_file() else no_journal(group)
        runs |= {id(run): run for run in (logs if every else [max(logs, key=lambda run: run.time)])}
    return sorted(runs.values(), key=lambda run: run.began)


def _runs(file: Path, readers: dict[Path, JournalReader]) -> list[History]:
    reader = readers.setdefault(file.resolve(), JournalReader(file, History))
    reader.update()
    return [run for run in reader.runs.values() if isinstance(run, History)]


def _default_file(runs: Sequence[History], readers: dict[Path, JournalReader]) -> Path:
    """Return a file in the folder of the newest run's journal, named after the run, or after the journal of several runs."""
    newest = max(runs, key=lambda run: run.time)
    journal = next(reader.file for reader in readers.values() if newest in reader.runs.values())
    name = journal.name.removesuffix(SUFFIX) if len(runs) == 1 else "runs"
    return journal.with_name(f"{name}.report.html")


def _write(file: Path, html: str) -> None:
    """Write the report atomically. Raises UserError when that fails."""
    content = html.encode(errors="replace")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda partial: partial.write_bytes(content), lambda: len(content))
    except OSError as error:
        reason = error.reason if isinstance(error, WriteError) else error.strerror or error
        raise UserError(f"cannot write the report {file}: {reason}") from None
