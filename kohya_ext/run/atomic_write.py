"""Files and folders that appear under their name only when they are whole.

They are written under another name in the same folder, one for each writer, flushed to the disk and then renamed: a crash,
a kill or a full disk leaves the earlier file, and two processes that write the same file do not meet. PostgreSQL, Git and
Borg do the same; see https://lwn.net/Articles/457667/ ("Ensuring data reaches disk").
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kohya_ext.console import note, warn

PARTIAL = ".partial"
"""The suffix of a file or folder that is being written: ``NAME.HOST-PID-NUMBER.partial``."""

_OLD = ".replaced"
_POLL_SECONDS = 2.0
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}

R = TypeVar("R")


class DiskFullError(OSError):
    """There was no room; what bore the name before is whole."""

    def __init__(self, path: Path, needed: int, free: int) -> None:
        """``needed`` and ``free`` are bytes."""
        self.path, self.needed, self.free = path, needed, free
        super().__init__(
            errno.ENOSPC,
            f"no room for {path.name}: it needs {_gb(needed)}, {_gb(free)} is free in {path.parent}, "
            f"{_gb(max(needed - free, 1))} is missing",
        )

    def __str__(self) -> str:
        return str(self.strerror)


@dataclass(frozen=True)
class WhenFull:
    """What to do about a full disk."""

    wait_seconds: float = 0.0
    """For how long to keep the data in memory and try again."""
    fallback: Path | None = None
    """A folder to write to instead, at once."""


class _Inner(threading.local):
    depth = 0
    """How many folders, and :func:`impatient` blocks, this thread is in."""


_inner = _Inner()

_spared: set[Path] = set()
"""What must not be replaced, but kept aside."""


_numbers = itertools.count()

_finals: dict[Path, Path] = {}
"""What is being written -> the name it will have."""


def final_of(path: Path) -> Path:
    """Return the name that a file or folder will have once it is whole; its own name when it is not being written."""
    return _finals.get(path, path)


def shortened(name: str) -> str:
    """Return as much of a file's name as leaves room for an ending: most file systems allow 255 bytes."""
    return name.encode()[:200].decode(errors="ignore")


def _partial(final: Path) -> Path:
    """Return a name of this writer's own."""
    host = "".join(filter(str.isalnum, socket.gethostname()))[:16] or "host"
    return final.with_name(f"{shortened(final.name)}.{host}-{os.getpid()}-{next(_numbers)}{PARTIAL}")


def spare(path: Path) -> None:
    """Have what is at ``path`` kept as :func:`previous` when something else is given its name."""
    _spared.add(path)


def previous(path: Path) -> Path:
    """``cat.safetensors`` -> ``cat.previous.safetensors``; a folder ``cat`` -> ``cat.previous``."""
    return path.with_name(f"{path.name}.previous" if path.is_dir() else f"{path.stem}.previous{path.suffix}")


def set_aside(folders: Sequence[Path], older: Sequence[Path]) -> None:
    """Rename folders to :func:`previous`, so that one earlier run's are kept; ``older`` ones go when there are newer ones."""
    if not folders:
        return
    try:
        for folder in older:
            remove_whole(folder)
        for folder in folders:
            folder.rename(previous(folder))
    except OSError as error:  # Windows, where a file in it is open: no reason to end a run
        warn(f"states of an earlier run stay under their names: {error}")
        return
    names = ", ".join(sorted(folder.name for folder in folders))
    note(f"states of an earlier run are kept as NAME.previous: {names}")


def write_whole(final: Path, write: Callable[[Path], R], size: Callable[[], int], full: WhenFull | None = None) -> R:
    """Have ``write`` make the file or folder at another path, then give it the name ``final``.

    ``size`` says how many bytes a file takes; it is asked only when there was no room. Of a folder it is 0 when that is
    not known: then what was written and the file that did not fit are counted. Raises :class:`DiskFullError` when there is no
    room and ``full`` did not help, and whatever else ``write`` raises; in each case ``final`` is what it was. Within a
    folder that is itself being written this way nothing is waited for: the folder is tried again as a whole.
    """
    full = WhenFull() if full is None or _inner.depth else full
    try:
        return _write_once(final, write, size)
    except DiskFullError as error:
        if full.fallback is not None:
            elsewhere = full.fallback / final.name
            warn(f"{error}; it goes to {elsewhere} instead")
            full.fallback.mkdir(parents=True, exist_ok=True)
            return _write_once(elsewhere, write, size)
        if full.wait_seconds <= 0:
            raise
        return _wait_and_write(final, write, size, error, time.monotonic() + full.wait_seconds)


def _wait_and_write(final: Path, write: Callable[[Path], R], size: Callable[[], int], full: DiskFullError, until: float) -> R:
    minutes = (until - time.monotonic()) / 60
    warn(f"{full}; the data stays in memory and is tried again for {minutes:.3g} minutes: make room there")
    while time.monotonic() < until:
        time.sleep(min(_POLL_SECONDS, max(until - time.monotonic(), 0)))
        if shutil.disk_usage(final.parent).free < full.needed:
            continue
        try:
            result = _write_once(final, write, size)
        except DiskFullError as error:
            full = error
        else:
            note(f"there is room again: {final.name} is saved")
            return result
    raise full


def _write_once(final: Path, write: Callable[[Path], R], size: Callable[[], int]) -> R:
    partial = _partial(final)
    _finals[partial] = final
    try:
        with impatient():
            result = write(partial)
        _flush(partial)
        _set_usual_mode(partial, final)
        _give_name(partial, final)
    except BaseException as error:
        written = _bytes_in(partial)
        remove(partial)
        if isinstance(error, Exception) and (problem := _as_disk_full(error, final, size, written)) is not None:
            raise problem from error
        raise
    finally:
        del _finals[partial]
    return result


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Within it a full disk is an error at once, whatever the caller of :func:`write_whole` says."""
    _inner.depth += 1
    try:
        yield
    finally:
        _inner.depth -= 1


def _as_disk_full(error: Exception, final: Path, size: Callable[[], int], written: int) -> DiskFullError | None:
    """Tell a full disk from another failure: safetensors and torch hide the operating system's number in a text."""
    free = shutil.disk_usage(final.parent).free
    if isinstance(error, DiskFullError):  # of a file in this folder
        return DiskFullError(final, max(size(), written + error.needed), free)
    known = getattr(error, "errno", None) in _FULL or any(
        sign in str(error) for sign in ("No space left", "os error 28", "code: 28", "os error 122", "code: 122")
    )
    if known or (isinstance(error, (OSError, RuntimeError)) and free < size()):
        return DiskFullError(final, size(), free)
    return None


def _flush(path: Path) -> None:
    """Make what was written reach the disk, a folder with all that is in it."""
    for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in names:
            with open(os.path.join(folder, name), "rb+") as file:
                os.fsync(file.fileno())
    if path.is_dir():
        _flush_folder(path)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened, and its entries need no flushing
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # a network file system that knows no such thing
        pass
    finally:
        os.close(descriptor)


def _set_usual_mode(partial: Path, final: Path) -> None:
    """Give a file the mode that ``open()`` gives: that of the file it replaces, or that of a new file in its folder.

    safetensors 0.8 writes through a temporary file that only its owner may read.
    """
    if os.name != "posix" or not partial.is_file():
        return
    if final.is_file() and final not in _spared:
        mode = final.stat().st_mode
    elif partial.stat().st_mode & 0o077:
        return
    else:
        new = partial.with_name(f"{partial.name}{PARTIAL}")
        new.touch()  # rather than asking for the umask, which is the whole process's: threads would meet there
        mode = new.stat().st_mode
        new.unlink()
    with contextlib.suppress(OSError):  # a file system without modes
        partial.chmod(mode & 0o777)


def in_own_folder(write: Callable[[Path], R]) -> Callable[[Path], R]:
    """Return a writer that writes its file in a new folder first, so that a killed writer's temporary files are swept with it.

    safetensors 0.8 writes the whole file under a random name (``.tmp`` and six letters) next to its target.
    """

    def write_there(path: Path) -> R:
        path.mkdir()
        result = write(path / path.name)
        whole = (path / path.name).rename(path.with_name(path.name.removesuffix(PARTIAL) + f"-0{PARTIAL}"))
        path.rmdir()
        whole.rename(path)
        return result

    return write_there


def _give_name(partial: Path, final: Path) -> None:
    if final in _spared:
        _spared.remove(final)
        if final.exists():
            kept = previous(final)
            remove(kept)
            final.rename(kept)
            note(f"{final.name}, which was there before this run, is kept as {kept.name}")
    if partial.is_dir() and final.is_dir():
        # A folder cannot replace one that is not empty: the old one steps aside first.
        old = final.with_name(final.name + _OLD)
        remove(old)
        final.rename(old)
        partial.rename(final)
        remove(old)
    else:
        partial.replace(final)
    _flush_folder(final.parent)


def remove_whole(folder: Path) -> None:
    """Remove a folder so that a crash leaves all of it or nothing under its name."""
    doomed = folder.with_name(folder.name + _OLD)
    remove(doomed)
    folder.rename(doomed)
    remove(doomed)


def _bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _gb(size: int) -> str:
    """A size in GB (1e9 bytes), or MB below one."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
