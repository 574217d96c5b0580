"""Write the journal of a run: a file of JSON lines with its settings, steps, events and end.

Each line is one ``write`` to a file opened for appending, so that it survives SIGKILL of this process. Every process of a run
appends a part, which begins with a ``start`` line. After an error, for example on a full disk, lines are missing and the run
continues: the functions below never raise.

Every line has ``kind`` and ``time`` (seconds since 1970). The kinds:

- ``start``: command line, versions, GPU and predictions, before the models are loaded;
- ``training``: numbers of images, buckets and steps, before the first step;
- ``step``: an optimizer step;
- ``ranks``: memory and times of all processes of the run, twice a minute;
- ``save``, ``state``, ``sample``, ``stop``, ``skip``, ``out_of_memory``, ``spill``, ``resume``, ``warning``: events;
- ``validation``: the losses of the validation images, see :mod:`kohya_ext.run.evaluations`;
- ``profile``: where the time of the steps of --profile_steps goes;
- ``check``: the newest model, with ``file``, ``problems`` and ``summary``;
- ``end``: status, reason and exit code.

:mod:`kohya_ext.run.journal_reader` reads it. Other processes than the first, and data-loader workers, write nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

from kohya_ext import console
from kohya_ext.errors import first_line
from kohya_ext.run.journal_reader import RunLog
from kohya_ext.run.output_files import is_state
from kohya_ext.run.plain_file import NotPlainError, open_for_append, shared_reader

SUFFIX = ".journal.jsonl"
"""Follows the output name in the journal's file name."""


P = ParamSpec("P")


@dataclass
class Journal:
    """The journal of this process's run."""

    file: Path
    run: str
    """Identifies the run across resumes: :attr:`RunRecord.id`."""
    folders: frozenset[str] = frozenset()
    """Absolute paths of the folders whose new files are recorded: see :func:`saved`."""
    step: Callable[[], int] = lambda: 0
    """Returns the optimizer steps so far, including those before a resume. Added to events."""
    files: int = 0
    """Number of models, states and samples written so far."""
    seconds: float = 0.0
    """Time in which models and states were written."""
    log: RunLog = field(init=False)
    """The lines of this process, also those that could not be written."""
    _descriptor: int | None = None
    _problem: str = ""
    """Why a line could not be written, until that is reported."""
    _warned: bool = False
    _torn: bool = False
    """Whether the last line is incomplete, or the file may end with an earlier process's incomplete line."""
    process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.log = RunLog(self.run)

    def open(self) -> None:
        """Open the file for appending; create it and its folder if needed."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if not _is_journal(self.file):
                raise NotPlainError(self.file, "a file of another program")
            self._descriptor = open_for_append(self.file)
            self._torn = os.fstat(self._descriptor).st_size > 0
        except NotPlainError as error:
            self._problem = f"{error.strerror}, which is left unchanged; remove it or set --journal_file"
        except OSError as error:
            self._problem = str(error.strerror or error)

    def write(self, kind: str, **data: Any) -> None:
        """Append a line. Does nothing in a forked process. May be called from a signal handler."""
        if os.getpid() != self.process:
            return
        line = {"kind": kind, "time": round(time.time(), 3), **data}
        self.log.add(line)
        for listener in tuple(_listeners):
            _or_warning(partial(listener, line))
        if self._descriptor is None:
            return
        content = _encoded(line)
        try:
            written = os.write(self._descriptor, b"\n" + content if self._torn else content)
            self._torn = written < len(content)
        except OSError as error:
            self._problem = str(error.strerror or error)

    @property
    def complete(self) -> bool:
        """Whether the file has all lines of this process."""
        return self._descriptor is not None and not self._warned and not self._problem

    def has(self, folder: str) -> bool:
        """Return whether new files of a folder are recorded."""
        return os.path.abspath(folder) in self.folders

    def report_problem(self) -> None:
        """Warn once if a line could not be written."""
        if self._problem and not self._warned:
            self._warned = True
            console.warn(f"the journal {self.file} is incomplete: {self._problem}; training continues")

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and os.getpid() == self.process:
            os.close(descriptor)


def _is_journal(file: Path) -> bool:
    """Return whether lines may be appended to a file: it is missing, or empty, or begins as a journal does."""
    if file.is_symlink() or not file.is_file():
        return True  # opening it creates or refuses it
    with shared_reader(file) as stream:
        start = stream.read(1024).lstrip()
    return not start or start.startswith(b'{"kind":')


def _encoded(line: Mapping[str, Any]) -> bytes:
    """Return a line as JSON, in which numbers that are not finite are null."""
    try:
        text = json.dumps(line, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(line), default=str, separators=(",", ":"))
    return text.encode() + b"\n"


def finite(value: Any) -> Any:
    """Return plain data for JSON, with None in place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [*map(finite, value)] if isinstance(value, (list, tuple)) else value


Listener = Callable[[Mapping[str, Any]], None]

_listeners: list[Listener] = []
_current: Journal | None = None
_exit_code: int | None = None
_finish: Callable[[], None] | None = None
_has_failed = False
"""Whether an unexpected error was reported."""


def _or_warning(action: Callable[[], object]) -> None:
    """Call an action. A failure is a warning, once per process, because no line is worth a run."""
    global _has_failed
    try:
        action()
    except Exception as problem:
        if not _has_failed:
            _has_failed = True
            console.warn(f"the journal is incomplete: {first_line(problem)}; training continues")


def _harmless(function: Callable[P, None]) -> Callable[P, None]:
    @wraps(function)
    def harmless(*args: P.args, **kwargs: P.kwargs) -> None:
        _or_warning(lambda: function(*args, **kwargs))

    return harmless


def begin(journal: Journal | None, on_finish: Callable[[], None] | None = None) -> None:
    """Set the journal of this process's run; None ends it. ``on_finish`` writes the last line."""
    global _current, _finish
    _current, _finish = journal, on_finish
    console.on_warning = None if journal is None else _on_warning


def _on_warning(message: str) -> None:
    event("warning", problem=message)


def listen(listener: Listener) -> None:
    """Call a function with each line of this process, until :func:`stop_listening`.

    It may be called from a signal handler.
    """
    _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Stop calling a function; does nothing for one that is not called."""
    if listener in _listeners:
        _listeners.remove(listener)


@_harmless
def event(kind: str, **data: Any) -> None:
    """Append an event with the current step; does nothing without a journal."""
    if _current is not None:
        _current.write(kind, **{"step": _current.step(), **data})


@_harmless
def saved(path: Path, seconds: float, intended: Path | None = None) -> None:
    """Append the event of a complete model or state, written in ``seconds``. Files of other folders are left out.

    ``intended``: where it belongs, if it had to be written elsewhere.
    """
    if _current is None or not _current.has(str((intended or path).parent)) or path.suffix == ".npz":
        return
    _current.files += 1
    _current.seconds += seconds
    size = {} if path.is_dir() else {"bytes": path.stat().st_size}
    event("state" if is_state(path) else "save", file=os.path.abspath(path), seconds=round(seconds, 3), **size)


@_harmless
def sampled(path: Path) -> None:
    """Append the event of a sample image. Other images are left out."""
    if _current is not None and path.parent.name == "sample" and _current.has(str(path.parent.parent)):
        _current.files += 1
        event("sample", file=os.path.abspath(path))


def files_written() -> int:
    """Return the number of models, states and samples of this process's run so far; 0 without a journal."""
    return 0 if _current is None else _current.files


@_harmless
def finish() -> None:
    """Write the last line, in a process that ends without its exit handlers."""
    if _finish is not None:
        _finish()


def set_exit_code(code: object) -> None:
    """Record the code of SystemExit, which exit handlers cannot read; None is 0 and a message is 1."""
    global _exit_code
    _exit_code = code if isinstance(code, int) else 0 if code is None else 1


def exit_code() -> int | None:
    """Return the recorded exit code of this process; None if it is not known."""
    return _exit_code
