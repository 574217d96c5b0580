"""Atomic writes of files and folders.

Each writer uses a temporary name in the same folder, flushes to disk and renames. A crash, a kill or a full disk leaves the
earlier file intact, and two processes that write the same file do not interfere. PostgreSQL, Git and Borg do the same; see
https://lwn.net/Articles/457667/ ("Ensuring data reaches disk").
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kohya_ext.console import note, warn
from kohya_ext.renames import is_open, rename, unlink
from kohya_ext.run import journal

PARTIAL = ".partial"
"""The suffix of a file or folder during the write: ``NAME.HOST-PID-NUMBER.partial``."""

_OLD = ".replaced"
_POLL_SECONDS = 2.0
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

R = TypeVar("R")


class DiskFullError(OSError):
    """The disk is full. The earlier file of that name, if any, is intact."""

    def __init__(self, path: Path, needed: int, free: int) -> None:
        """``needed`` and ``free`` are bytes."""
        self.path, self.needed, self.free = path, needed, free
        super().__init__(
            errno.ENOSPC,
            f"disk full: cannot write {path.name} ({_gb(needed)}) to {path.parent} ({_gb(free)} free); "
            f"free up {_gb(max(needed - free, 1))}",
        )

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class DiskFullPolicy:
    """How to handle a full disk."""

    wait_seconds: float = 0.0
    """How long to keep the data in memory and retry."""
    fallback: Path | None = None
    """A folder to write to instead, without waiting."""


class _FailFast(threading.local):
    depth = 0
    """The number of :func:`fail_fast` blocks that this thread is in."""


_fail_fast = _FailFast()

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


def write_atomically(
    final: Path, write: Callable[[Path], R], size: Callable[[], int], policy: DiskFullPolicy | None = None
) -> R:
    """Write a file or folder with ``write(temporary_path)``, then rename it to ``final``.

    ``size`` returns the bytes needed, and is called only when the disk is full. It may return 0 for a folder: then the bytes
    written so far and the file that failed are counted.

    Raises :class:`DiskFullError` when the disk is full and ``policy`` did not help, and any exception of ``write``. On
    failure ``final`` is unchanged. Inside another atomic write this one fails immediately, and the outer one retries.
    """
    policy = DiskFullPolicy() if policy is None or _fail_fast.depth else policy
    try:
        return _write_once(final, write, size)
    except DiskFullError as error:
        if policy.fallback is not None:
            fallback = policy.fallback / final.name
            warn(f"{error}. Writing to {fallback} instead")
            policy.fallback.mkdir(parents=True, exist_ok=True)
            return _write_once(fallback, write, size)
        if policy.wait_seconds <= 0:
            raise
        return _wait_and_write(final, write, size, error, time.monotonic() + policy.wait_seconds)


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


def _wait_and_write(final: Path, write: Callable[[Path], R], size: Callable[[], int], full: DiskFullError, until: float) -> R:
    minutes = (until - time.monotonic()) / 60
    warn(f"{full}. Retrying for {minutes:.3g} minutes; the data stays in memory")
    while time.monotonic() < until:
        time.sleep(min(_POLL_SECONDS, max(until - time.monotonic(), 0)))
        if shutil.disk_usage(final.parent).free < full.needed:
            continue
        try:
            result = _write_once(final, write, size)
        except DiskFullError as error:
            full = error
        else:
            note(f"disk has free space again: saved {final.name}")
            return result
    raise full


def _write_once(final: Path, write: Callable[[Path], R], size: Callable[[], int]) -> R:
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
        remove(partial)
        if isinstance(error, Exception) and (problem := _as_disk_full(error, final, size, written)) is not None:
            raise problem from error
        raise
    finally:
        del _finals[partial]
    journal.saved(written_to, time.monotonic() - began)
    return result


@contextlib.contextmanager
def fail_fast() -> Iterator[None]:
    """Make :func:`write_atomically` raise on a full disk immediately, whatever its policy."""
    _fail_fast.depth += 1
    try:
        yield
    finally:
        _fail_fast.depth -= 1


def _as_disk_full(error: Exception, final: Path, size: Callable[[], int], written: int) -> DiskFullError | None:
    """Return a failed write as a full-disk error, or None. safetensors and torch give the error number only in the text."""
    free = shutil.disk_usage(final.parent).free
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
        result = write(path / path.name)
        complete = (path / path.name).rename(path.with_name(path.name.removesuffix(PARTIAL) + f"-0{PARTIAL}"))
        path.rmdir()
        complete.rename(path)
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
    return (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(2))


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
        rename(partial, final)
        remove(old)
    else:
        rename(partial, final)


def remove_atomically(folder: Path) -> None:
    """Remove a folder so that a crash leaves all of it or nothing under its name. Raises OSError."""
    renamed = folder.with_name(folder.name + _OLD)
    remove(renamed)
    rename(folder, renamed)
    remove(renamed)


def _bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


def remove(path: Path) -> None:
    """Remove a file, or a folder and its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        unlink(path)


def _gb(size: int) -> str:
    """Format bytes as GB (1e9 bytes), or as MB (1e6 bytes) below 1 GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
