"""What the extension says, on standard error, so that a script's own output stays as it is."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from kohya_ext.errors import UserError

_STANDARD_ERROR = 2

#: Seconds that work may take before :func:`progress` reports it.
_PATIENCE = 1.0

_silent = False


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Say nothing inside the block but errors: what looks like a run there is none."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def note(message: str) -> None:
    """Say one line, once a run: other ranks and data-loader workers stay silent."""
    if speaks():
        with _progress_bars_out_of_the_way():
            print(f"kohya_ext: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress_bars_out_of_the_way() -> Iterator[None]:
    """Clear the progress bars that tqdm draws, if it draws any, and draw them again below what is printed."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        yield
    else:
        with tqdm.tqdm.external_write_mode(file=sys.stderr):
            yield


def note_at_once(message: str) -> None:
    """As :func:`note`, from a signal's handler: that may interrupt a write to standard error, whose buffer lets no other in."""
    if speaks():
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, f"\nkohya_ext: {message}\n".encode())


def warn(message: str) -> None:
    """Say one line of warning, once a run."""
    note(f"warning: {message}")


def error(message: str) -> None:
    """Say what is wrong, whoever finds it."""
    print(f"kohya_ext: error: {message}", file=sys.stderr, flush=True)


def stop(message: str) -> NoReturn:
    """Say what is wrong and leave with exit code 2, from wherever the script is."""
    for line in message.splitlines():
        error(line)
    raise SystemExit(UserError.exit_code)


def speaks() -> bool:
    """Return whether this process is the one of its run that talks: rank 0, and no worker of it."""
    return not _silent and os.environ.get("RANK", "0") == "0" and multiprocessing.parent_process() is None


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Report on standard error that ``what`` is being done, if the block takes longer than a second.

    A terminal shows one line with the seconds so far, which disappears at the end; a file or a pipe gets a single line.
    """
    done = threading.Event()
    reporter = threading.Thread(target=_report, args=(what, done), daemon=True)
    if speaks():
        reporter.start()
    try:
        yield
    finally:
        done.set()
        if reporter.ident is not None:
            reporter.join()


def _report(what: str, done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(_PATIENCE):
        return
    if not sys.stderr.isatty():
        note(f"{what} ...")
        return
    line = ""
    width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be written over
    while not done.is_set():
        line = f"kohya_ext: {what}: {time.monotonic() - start:.0f} s"[:width]
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        done.wait(1.0)
    # Spaces instead of an escape sequence, which older Windows consoles print as text.
    print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
