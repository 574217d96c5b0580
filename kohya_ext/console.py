"""Messages on standard error, so that a script's own output is unchanged."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from kohya_ext.errors import UserError

_STANDARD_ERROR = 2

#: Seconds before :func:`progress` reports a task.
_PROGRESS_DELAY = 1.0

_silent = False
_any_rank = False

on_warning: Callable[[str], None] | None = None
"""Receives each warning, also in processes that print nothing."""


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress everything but errors inside the block."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def note(message: str) -> None:
    """Print one line, once per run: other ranks and data-loader workers print nothing."""
    if should_print():
        with _progress_bars_cleared():
            print(f"kohya_ext: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress_bars_cleared() -> Iterator[None]:
    """Clear tqdm's progress bars inside the block, and redraw them below the output."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is None:
        yield
    else:
        with tqdm.tqdm.external_write_mode(file=sys.stderr):
            yield


def note_at_once(message: str) -> None:
    """Print one line from a signal handler: it may interrupt a write to standard error, whose buffer is not reentrant."""
    if should_print():
        with contextlib.suppress(OSError):
            os.write(_STANDARD_ERROR, f"\nkohya_ext: {message}\n".encode())


def warn(message: str) -> None:
    """Print a warning, once per run."""
    note(f"warning: {message}")
    if on_warning is not None:
        on_warning(message)


def error(message: str) -> None:
    """Print an error, from any process."""
    print(f"kohya_ext: error: {message}", file=sys.stderr, flush=True)


def stop(message: str) -> NoReturn:
    """Print an error, one message per line, and exit the process with code 2."""
    for line in message.splitlines():
        error(line)
    raise SystemExit(UserError.exit_code)


def hide_notices_of_libraries() -> None:
    """Hide what libraries log at each import about features that no training script uses."""
    # bitsandbytes on CPUs with AVX-512 and bf16: its kernel for 4-bit products on the CPU is not installed.
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_not_about_4_bits)


def _is_not_about_4_bits(record: logging.LogRecord) -> bool:
    return "gemm_4bit_forward" not in str(record.msg)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Print the messages inside the block from any rank."""
    global _any_rank
    _any_rank = True
    try:
        yield
    finally:
        _any_rank = False


def should_print() -> bool:
    """Return whether this process prints messages: rank 0, but not its data-loader workers."""
    is_first = _any_rank or os.environ.get("RANK", "0") == "0"
    return not _silent and is_first and multiprocessing.parent_process() is None


@contextlib.contextmanager
def progress(task: str) -> Iterator[None]:
    """Report ``task`` on standard error if the block takes longer than a second.

    A terminal shows one line with the seconds so far, which is cleared at the end; a file or a pipe gets a single line.
    """
    done = threading.Event()
    reporter = threading.Thread(target=_report, args=(task, done), daemon=True)
    if should_print():
        reporter.start()
    try:
        yield
    finally:
        done.set()
        if reporter.ident is not None:
            reporter.join()


def _report(task: str, done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(_PROGRESS_DELAY):
        return
    if not sys.stderr.isatty():
        note(f"{task} ...")
        return
    line = ""
    width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be overwritten
    while not done.is_set():
        line = f"kohya_ext: {task}: {time.monotonic() - start:.0f} s"[:width]
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        done.wait(1.0)
    # Spaces instead of an escape sequence, which older Windows consoles print as text.
    print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)
