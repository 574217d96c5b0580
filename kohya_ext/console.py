"""Messages on standard error, so that a script's own output is unchanged, and what a terminal or a code page can show."""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from kohya_ext.errors import UserError

_STANDARD_ERROR = 2

ERROR = "kohya_ext: error: "
"""The beginning of an error's line."""

#: Seconds before :func:`progress` reports a task.
_PROGRESS_DELAY = 1.0

_silent = False
_any_rank = False

#: Characters that change what a terminal shows instead of being shown: C0 and C1 controls (escape sequences), line and
#: paragraph separators, and controls of the writing direction. Also surrogates, which no stream can encode.
_NOT_SHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

#: Error handlers with which a stream raises: of PYTHONIOENCODING, and of Python itself on Windows and in the C locale.
_RAISING = ("strict", "surrogateescape")

on_warning: Callable[[str], None] | None = None
"""Receives each warning, also in processes that print nothing."""


def printable(text: str, lines: bool = False) -> str:
    """Return text with escapes, as Python writes them, in place of characters that a terminal interprets.

    For everything that does not come from this program: names of files and tensors, metadata, captions, journals. ``lines``:
    keep line breaks.
    """
    return "\n".join(map(printable, text.split("\n"))) if lines else _NOT_SHOWN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def replace_unencodable() -> None:
    """Make the standard streams of this process replace characters outside their encoding, instead of raising.

    On Windows an output that is not a console (a pipe, a file, a GUI) has the legacy code page, in which one Japanese word
    would end a run with UnicodeEncodeError. Standard error already replaces them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _RAISING:
            stream.reconfigure(errors="replace")


class _Output(io.FileIO):
    """The file of a standard stream, which drops what cannot be written."""

    replaced: io.TextIOWrapper | None = None
    """The stream before, which would close the file if nothing held it."""

    def write(self, data: Any) -> int:
        """Write; return the number of bytes, also of those that were dropped."""
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def drop_unwritable() -> None:
    """Make the standard streams of this process drop what they cannot write, instead of raising.

    The reader of a pipe has ended (a GUI that is closed, ``tee`` after Ctrl-C), the terminal is closed, or the disk of a log is
    full. A print of the script would end the run, also while it saves.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        binary = stream.buffer
        raw = getattr(binary, "raw", binary)
        if type(raw) is io.FileIO:  # not a console of Windows
            stream.flush()
            output = _Output(raw.fileno(), "w", closefd=False)
            output.name, output.replaced = stream.name, stream
            new = output if raw is binary else io.BufferedWriter(output)  # as before: Python may run unbuffered
            options = (stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)
            setattr(sys, name, io.TextIOWrapper(new, *options))


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
            _write(f"kohya_ext: {printable(message)}\n")


def _write(text: str) -> None:
    """Write to standard error. Never raises: it may be closed, a pipe without a reader, or missing under pythonw."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


@contextlib.contextmanager
def _progress_bars_cleared() -> Iterator[None]:
    """Clear tqdm's progress bars inside the block, and redraw them below the output."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)  # another thread may be importing the module
    if bars is None:
        yield
    else:
        with bars.external_write_mode(file=sys.stderr):
            yield


def note_at_once(message: str) -> None:
    """Print one line from a signal handler: it may interrupt a write to standard error, whose buffer is not reentrant."""
    if should_print():
        with contextlib.suppress(OSError):
            encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
            os.write(_STANDARD_ERROR, f"\nkohya_ext: {printable(message)}\n".encode(encoding, "backslashreplace"))


def warn(message: str) -> None:
    """Print a warning, once per run."""
    note(f"warning: {message}")
    if on_warning is not None:
        on_warning(message)


def error(message: str) -> None:
    """Print an error, from any process."""
    _write(f"{ERROR}{printable(message)}\n")


def stop(message: str) -> NoReturn:
    """Print an error, one message per line, and exit the process with code 2."""
    for line in message.split("\n"):
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
    return not _silent and is_first and not is_worker()


def is_worker() -> bool:
    """Return whether multiprocessing has started this process, as a data loader's worker.

    A spawned one imports the script before it knows its parent; multiprocessing marks that time with an attribute.
    """
    return multiprocessing.parent_process() is not None or hasattr(multiprocessing.current_process(), "_inheriting")


_progress_lock = threading.Lock()
_reporting = False  # whether a task is reported now


@contextlib.contextmanager
def progress(task: str | Callable[[], str]) -> Iterator[None]:
    """Report ``task``, or what it returns at that time, on standard error if the block takes longer than a second.

    A terminal shows one line with the seconds so far, which is cleared at the end; a file or a pipe gets a single line. A block
    inside of another one, or of another thread at the same time, reports nothing.
    """
    global _reporting
    done = threading.Event()
    reporter = threading.Thread(target=_report, args=(task, done), daemon=True)
    with _progress_lock:
        is_first, _reporting = not _reporting, True
    if is_first and should_print():
        reporter.start()
    try:
        yield
    finally:
        if is_first:
            _reporting = False
        done.set()
        if reporter.ident is not None:
            reporter.join()


def _report(task: str | Callable[[], str], done: threading.Event) -> None:
    start = time.monotonic()
    if done.wait(_PROGRESS_DELAY):
        return
    now = task if callable(task) else lambda: task
    if sys.stderr is None or not sys.stderr.isatty():
        note(f"{now()} ...")
        return
    line = ""
    width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be overwritten
    while not done.is_set():
        line = f"kohya_ext: {printable(now())}: {time.monotonic() - start:.0f} s"[:width]
        _write(f"\r{line}")
        done.wait(1.0)
    # Spaces instead of an escape sequence, which older Windows consoles print as text.
    _write(f"\r{' ' * len(line)}\r")
