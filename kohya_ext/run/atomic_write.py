"""Atomic writes of files and folders.

Each writer uses a temporary name in the same folder, flushes to disk and renames. A crash, a kill or a full disk leaves the
earlier file intact, and two processes that write the same file do not interfere. PostgreSQL, Git and Borg do the same; see
https://lwn.net/Articles/457667/ ("Ensuring data reaches disk").

What training has computed is in memory only, so a write of a model or state is repeated when the disk is full or its folder
cannot be written to (deleted, read-only, replaced by a file, open in another program), and then made to another folder.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree  # not as an attribute of shutil: there a patch replaces it by a function that calls this module
from typing import TypeVar

from kohya_ext import cache
from kohya_ext.console import note, warn
from kohya_ext.errors import first_line
from kohya_ext.renames import is_open, rename, unlink
from kohya_ext.run import journal

PARTIAL = ".partial"
"""The suffix of a file or folder during the write: ``NAME.HOST-PID-NUMBER.partial``."""

_OLD = ".replaced"
_INNER = "new"
_POLL_SECONDS = 2.0
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

#: Errors of safetensors and torch, which have no error number, when they cannot write.
_WRITE_PROBLEM = re.compile(
    r"os error \d+|I/O error|Parent directory .* does not exist"
    r"|PytorchStreamWriter|unexpected pos|file write failed|iostream error"  # torch raises the second in place of the others
)

R = TypeVar("R")


class WriteError(OSError):
    """A file or folder cannot be written. The earlier file of that name, if any, is intact."""

    def __init__(self, path: Path, number: int | None, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(number or errno.EIO, f"cannot write {path.name} to {path.parent}: {reason}")

    def __str__(self) -> str:
        return str(self.strerror)


class DiskFullError(WriteError):
    """The disk is full."""

    def __init__(self, path: Path, needed: int, free: int) -> None:
        """``needed`` and ``free`` are bytes."""
        self.needed, self.free = needed, free
        super().__init__(path, errno.ENOSPC, "disk full")

    def __str__(self) -> str:
        place = f"{self.path.name} ({_gb(self.needed)}) to {self.path.parent} ({_gb(self.free)} free)"
        return f"disk full: cannot write {place}; free up {_gb(max(self.needed - self.free, 1))}"


@dataclass(frozen=True)
class WritePolicy:
    """How to handle a write that fails."""

    wait_seconds: float = 0.0
    """How long to keep the data in memory and retry."""
    fallback: Path | None = None
    """A folder to write to instead, without waiting."""
    is_output: bool = False
    """Whether the data exists in memory only: also handle other errors than a full disk, and at last write to the user's
    cache folder or the temporary folder."""

    def handles(self, error: WriteError) -> bool:
        """Return whether to retry or to write to another folder."""
        return self.is_output or isinstance(error, DiskFullError)

    def last_folders(self) -> list[Path]:
        """Return the folders that are tried when neither the folder nor ``fallback`` can be written to."""
        return [cache.folder() / _SAVED, Path(tempfile.gettempdir()) / "kohya_ext" / _SAVED] if self.is_output else []


#: A folder of this process, so that no file of another run is replaced.
_SAVED = Path("saved", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}_{os.getpid()}")


def folders_elsewhere(fallback: Path | None) -> list[Path]:
    """Return the folders to which earlier processes may have written; not the temporary folder, which other users share."""
    return [*([fallback] if fallback is not None else []), *(cache.folder() / _SAVED.parent).glob("*")]


class _Mode(threading.local):
    depth = 0
    """The number of :func:`fail_fast` blocks that this thread is in."""
    waits = True
    """Whether writes may wait: see :func:`not_waiting`."""


_mode = _Mode()

_recorders: list[list[Path]] = []
"""Lists of :func:`written_files`."""

_preserved: set[Path] = set()
"""Paths whose contents are renamed to :func:`previous` rather than replaced."""


_numbers = itertools.count()

_finals: dict[Path, Path] = {}
"""Temporary path -> final path."""


def final_path(path: Path) -> Path:
    """Return the final path of a temporary one; any other path unchanged."""
    return _finals.get(path, path)


def truncated(name: str) -> str:
    """Return a file name cut to 200 bytes. Most file systems allow 255, and a suffix follows."""
    return name.encode()[:200].decode(errors="ignore")


def _partial(final: Path) -> Path:
    """Return a temporary path that no other writer uses."""
    return final.with_name(f"{truncated(final.name)}.{_host()}-{os.getpid()}-{next(_numbers)}{PARTIAL}")


def _host() -> str:
    return "".join(filter(str.isalnum, socket.gethostname()))[:16] or "host"


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files in a folder that processes of this machine left when they were killed."""
    import psutil

    owner = re.compile(rf".+\.{_host()}-(\d+)-\d+{re.escape(PARTIAL)}")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for name in [entry.name for entry in entries if entry.name.endswith(PARTIAL)]:
            if (match := owner.fullmatch(name)) is not None and not psutil.pid_exists(int(match.group(1))):
                with contextlib.suppress(OSError):  # another process has removed it
                    os.remove(folder / name)


def preserve(path: Path) -> None:
    """Keep the present contents of ``path`` as :func:`previous` when they are next replaced."""
    _preserved.add(path)


def previous(path: Path) -> Path:
    """``cat.safetensors`` -> ``cat.previous.safetensors``; a folder ``cat`` -> ``cat.previous``."""
    return path.with_name(f"{path.name}.previous" if path.is_dir() else f"{path.stem}.previous{path.suffix}")


def rename_to_previous(folders: Sequence[Path], older: Sequence[Path]) -> None:
    """Rename folders to :func:`previous` and remove ``older`` ones, so that one earlier run is kept."""
    if not folders:
        return
    try:
        for folder in older:
            remove_atomically(folder)
        for folder in folders:
            rename(folder, previous(folder))
    except OSError as error:  # on Windows a file in it may be open, which must not end a run
        warn(f"cannot rename the states of an earlier run: {error}")
        return
    names = ", ".join(sorted(folder.name for folder in folders))
    note(f"renamed the states of an earlier run to NAME.previous: {names}")


def write_atomically(final: Path, write: Callable[[Path], R], size: Callable[[], int], policy: WritePolicy | None = None) -> R:
    """Write a file or folder with ``write(temporary_path)``, then rename it to ``final``.

    ``size`` returns the bytes needed, and is called only when the disk is full. It may return 0 for a folder: then the bytes
    written so far and the file that failed are counted.

    Raises :class:`WriteError` when it cannot be written and ``policy`` did not help, and any other exception of ``write``. On
    failure ``final`` is unchanged. Inside another atomic write this one fails immediately, and the outer one retries.
    """
    policy = WritePolicy() if policy is None or _mode.depth else policy
    if not _mode.waits:
        policy = replace(policy, wait_seconds=0.0)
    try:
        return _write_once(final, write, size)
    except WriteError as problem:
        if not policy.handles(problem):
            raise
        error = problem
    for folder in [policy.fallback] if policy.fallback is not None else []:
        with contextlib.suppress(WriteError):
            return _write_elsewhere(folder, final, write, size, error)
    try:
        return _wait_and_write(final, write, size, error, policy.wait_seconds)
    except WriteError as problem:
        error = problem
    for folder in policy.last_folders():
        with contextlib.suppress(WriteError):
            return _write_elsewhere(folder, final, write, size, error)
    raise error


def _write_elsewhere(folder: Path, final: Path, write: Callable[[Path], R], size: Callable[[], int], error: WriteError) -> R:
    warn(f"{error}. Writing to {folder / final.name} instead")
    with contextlib.suppress(OSError):  # the write fails, too, and says why
        folder.mkdir(parents=True, exist_ok=True)
    try:
        return _write_once(folder / final.name, write, size, final)
    except WriteError as problem:
        warn(str(problem))
        raise


def write_together(final: Path, write: Callable[[Path], None], leads: bool, wait_for_others: Callable[[], object]) -> None:
    """Write a folder with all processes, each calling ``write(temporary_path)``; the one that ``leads`` renames it.

    ``write`` ends when every process has written. A full disk is not waited for, because the other processes could not repeat
    the write: any exception ends the run, and ``final`` is unchanged.
    """
    partial = final.with_name(f"{truncated(final.name)}.shared{PARTIAL}")
    if leads:
        remove(partial)  # left by a run that was killed
        partial.mkdir(parents=True)
    _finals[partial] = final
    began = time.monotonic()
    wait_for_others()
    try:
        with fail_fast():
            write(partial)
        if leads:
            _flush(partial)
            final = _rename(partial, final)
    finally:
        _finals.pop(partial, None)
    wait_for_others()
    if leads:
        journal.saved(final, time.monotonic() - began)


def _wait_and_write(final: Path, write: Callable[[Path], R], size: Callable[[], int], error: WriteError, seconds: float) -> R:
    """Retry for some seconds, and without a wait if the folder was deleted."""
    until = time.monotonic() + seconds
    if seconds > 0 and final.parent.exists():
        action = "" if isinstance(error, DiskFullError) else "; make the folder writable again"
        warn(f"{error}{action}. Retrying for {seconds / 60:.3g} minutes; the data stays in memory")
    waits = final.parent.exists()
    while not waits or time.monotonic() < until:
        if waits:
            time.sleep(min(_POLL_SECONDS, max(until - time.monotonic(), 0)))
        waits = True
        with contextlib.suppress(OSError):
            final.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(error, DiskFullError) and _free(final) < error.needed:
            continue
        try:
            result = _write_once(final, write, size)
        except WriteError as problem:
            error = problem
        else:
            was_full = isinstance(error, DiskFullError)
            note(f"{'disk has free space' if was_full else 'the folder can be written to'} again: saved {final.name}")
            return result
    raise error


def _write_once(final: Path, write: Callable[[Path], R], size: Callable[[], int], intended: Path | None = None) -> R:
    """Write a file or folder, which belongs to the folder of ``intended``. Raises WriteError if that is not possible."""
    partial = _partial(final)
    _finals[partial] = final
    began = time.monotonic()
    try:
        with fail_fast():
            result = write(partial)
        _flush(partial)
        _set_default_mode(partial, final)
        written_to = _rename(partial, final)
    except BaseException as error:
        written = _bytes_in(partial)
        with contextlib.suppress(OSError):  # its folder may be a file now
            remove(partial)
        if isinstance(error, Exception) and (problem := _as_write_error(error, partial, final, size, written)) is not None:
            raise problem from error
        raise
    finally:
        del _finals[partial]
    if not _mode.depth:
        for recorder in _recorders:
            recorder.append(written_to)
    journal.saved(written_to, time.monotonic() - began, intended)
    return result


@contextlib.contextmanager
def fail_fast() -> Iterator[None]:
    """Make :func:`write_atomically` raise :class:`WriteError` immediately, whatever its policy."""
    _mode.depth += 1
    try:
        yield
    finally:
        _mode.depth -= 1


@contextlib.contextmanager
def not_waiting() -> Iterator[None]:
    """Make :func:`write_atomically` write to another folder without waiting, because the process is about to end."""
    before, _mode.waits = _mode.waits, False
    try:
        yield
    finally:
        _mode.waits = before


@contextlib.contextmanager
def written_files() -> Iterator[list[Path]]:
    """Collect the paths of the models and states that are written inside the block, wherever they had to be written."""
    files: list[Path] = []
    _recorders.append(files)
    try:
        yield files
    finally:
        _recorders[:] = [each for each in _recorders if each is not files]


def _free(final: Path) -> int:
    """Return the free bytes of a path's disk, also if its folder was deleted or replaced by a file."""
    return shutil.disk_usage(next((folder for folder in final.parents if folder.is_dir()), Path())).free


def _as_write_error(error: Exception, partial: Path, final: Path, size: Callable[[], int], written: int) -> WriteError | None:
    """Return the error of a write if it comes from the disk or the folder; None for any other, such as a lost connection."""
    if (full := _as_disk_full(error, final, size, written)) is not None:
        return full
    number, name = getattr(error, "errno", None), getattr(error, "filename", None)
    is_here = name is None or final.parent in (path := Path(os.fsdecode(name))).parents or path in (partial, final.parent)
    known = isinstance(error, WriteError) or (isinstance(error, OSError) and number is not None and is_here)
    if not known and not _WRITE_PROBLEM.search(str(error)):
        return None
    reason = error.reason if isinstance(error, WriteError) else getattr(error, "strerror", None) or first_line(error)
    return WriteError(final, number, reason)


def _as_disk_full(error: Exception, final: Path, size: Callable[[], int], written: int) -> DiskFullError | None:
    """Return a failed write as a full-disk error, or None. safetensors and torch give the error number only in the text."""
    free = _free(final)
    if isinstance(error, DiskFullError):  # from a file in this folder
        return DiskFullError(final, max(size(), written + error.needed), free)
    known = getattr(error, "errno", None) in _FULL or any(
        sign in str(error) for sign in ("No space left", "os error 28", "code: 28", "os error 122", "code: 122")
    )
    if known or (isinstance(error, (OSError, RuntimeError)) and free < size()):
        return DiskFullError(final, size(), free)
    return None


def _flush(path: Path) -> None:
    """Flush a file, or a folder and every file in it, to disk."""
    for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in names:
            with open(os.path.join(folder, name), "rb+") as file:
                os.fsync(file.fileno())
    if path.is_dir():
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows cannot open a folder, and needs no flush of its entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # not supported by some network file systems
        pass
    finally:
        os.close(descriptor)


def _set_default_mode(partial: Path, final: Path) -> None:
    """Set the mode that ``open()`` would give: that of the replaced file, or of a new file in the folder.

    safetensors 0.8 writes a temporary file that only its owner can read.
    """
    if os.name != "posix" or not partial.is_file():
        return
    if final.is_file() and final not in _preserved:
        mode = final.stat().st_mode
    elif partial.stat().st_mode & 0o077:
        return
    else:
        new = partial.with_name(f"{partial.name}{PARTIAL}")
        new.touch()  # reading the umask means setting it for the whole process, which is not thread-safe
        mode = new.stat().st_mode
        new.unlink()
    with contextlib.suppress(OSError):  # file systems without modes
        partial.chmod(mode & 0o777)


def in_temporary_folder(write: Callable[[Path], R]) -> Callable[[Path], R]:
    """Return ``write`` wrapped to write its file in a new folder first.

    safetensors 0.8 writes to a random name (``.tmp`` and six letters) next to its target. In a folder that file is removed
    along with the other temporary files of a killed run.
    """

    def write_in_folder(path: Path) -> R:
        path.mkdir()
        result = write(path / _INNER)  # a short name, because Windows limits the length of a path
        complete = path.with_name(path.name.removesuffix(PARTIAL) + f"-0{PARTIAL}")
        rename(path / _INNER, complete)
        path.rmdir()
        rename(complete, path)
        return result

    return write_in_folder


def _rename(partial: Path, final: Path) -> Path:
    """Rename a complete file or folder to its final name, or to a free one if a program keeps a file of that name open."""
    try:
        _replace(partial, final)
    except OSError as error:
        if not is_open(error):
            raise
        taken, final = final, next(name for name in _numbered(final) if not name.exists())
        rename(partial, final)
        warn(f"{taken} is open in another program and cannot be replaced: saved {final.name} instead")
    _flush_folder(final.parent)
    return final


def _numbered(path: Path) -> Iterator[Path]:
    """Yield ``cat.2.safetensors`` and so on; for a folder, whose name may have a dot, ``cat.2``."""
    start, end = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    return (path.with_name(f"{start}.{number}{end}") for number in itertools.count(2))


def _replace(partial: Path, final: Path) -> None:
    if final in _preserved:
        if final.exists():
            backup = previous(final)
            remove(backup)
            rename(final, backup)
            note(f"renamed the earlier {final.name} to {backup.name}")
        _preserved.discard(final)
    if partial.is_dir() and final.is_dir():
        # A folder cannot replace a non-empty one, so rename the old one first.
        old = final.with_name(final.name + _OLD)
        remove(old)
        rename(final, old)
        try:
            rename(partial, final)
        except OSError:
            rename(old, final)
            raise
        remove(old)
    else:
        rename(partial, final)


def remove_atomically(folder: Path) -> None:
    """Remove a folder so that a crash leaves all of it or nothing under its name. Raises OSError."""
    remove(renamed_to_remove(folder))


def renamed_to_remove(path: Path) -> Path:
    """Rename a folder that is to be removed, and return its new path; that of a file unchanged. Raises OSError."""
    if not path.is_dir():
        return path
    renamed = path.with_name(path.name + _OLD)
    remove(renamed)
    rename(path, renamed)
    return renamed


def _bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


def remove(path: Path) -> None:
    """Remove a file, or a folder and its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        rmtree(path, ignore_errors=True)
    else:
        unlink(path)


def _gb(size: int) -> str:
    """Format bytes as GB (1e9 bytes), or as MB (1e6 bytes) below 1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
