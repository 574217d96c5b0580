"""Lock an output name, so that two runs never write the same files.

The operating system locks a hidden file in the output folder and releases it when the process ends, so a lock is never
stale. The file describes its owner, for the error message of a second run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import IO, Any

from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.run.atomic_write import PARTIAL, remove, truncated
from kohya_ext.run.output_files import output_name, temporary_paths
from kohya_ext.run.plain_file import NotPlainError, open_for_update, shared_reader

_LOCKED_BYTE = 1 << 30
"""The byte that is locked on Windows. Others cannot read a locked byte, so it is far behind the owner's description."""

_MOST = 4096
"""The largest number of characters of a lock file that are read."""

_locks: dict[Path, tuple[IO[str], int]] = {}
"""Lock file -> open file and the process that locked it. A forked child does not hold its parent's locks.

No other code in this process may open such a file: closing it would release the lock (fcntl(2), "record locks").
"""


def lock_file(args: Namespace) -> Path | None:
    """Return the lock file of a run's output name; None when the run writes nothing or its folder does not exist."""
    folder = getattr(args, "output_dir", None)
    if not folder or getattr(args, "debug_dataset", False) or not Path(folder).is_dir():
        return None
    output = Path(folder).resolve() / output_name(args)
    return output.with_name(f".{truncated(output.name)}.lock")


def acquire(args: Namespace) -> str | None:
    """Lock a run's output name until this process ends, and remove temporary files of killed runs.

    Returns a warning if it cannot be locked, as in a folder that cannot be written to. Raises UserError with the owner when
    another run holds the lock.
    """
    if getattr(args, "output_dir", None) and not getattr(args, "debug_dataset", False):
        with contextlib.suppress(OSError):  # preflight reports a folder that cannot be created
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    file = lock_file(args)
    if file is None or file in _locks:
        return None
    try:
        stream = _open_locked(file)
    except NotPlainError as error:
        raise _refusal(file, error) from None
    except OSError as error:
        return f"cannot lock {file}: {error.strerror or error}; do not start a second run with this output name"
    if stream is None:
        raise UserError(conflict_message(args, _owner(file)))
    stream.seek(0)
    stream.truncate()
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}, stream)
    stream.flush()
    _locks[file] = stream, os.getpid()
    for path in temporary_paths(Path(args.output_dir), getattr(args, "output_name", None), PARTIAL):
        remove(path)
        note(f"removed {path.name}, an incomplete file of a killed run")
    return None


def other_owner(args: Namespace) -> dict[str, Any] | None:
    """Return the host, pid and start time of another process that holds the lock, or None. Does not take the lock.

    Raises UserError for a lock file that :func:`acquire` would refuse.
    """
    file = lock_file(args)
    if file is None or file in _locks or not os.path.lexists(file):
        return None
    try:
        stream = _open_locked(file)
    except NotPlainError as error:
        raise _refusal(file, error) from None
    except OSError:
        return None
    if stream is None:
        return _owner(file)
    stream.close()
    return None


def _refusal(file: Path, error: NotPlainError) -> UserError:
    return UserError(f"cannot lock {file}: {error.strerror}; remove it, or choose another --output_name")


def conflict_message(args: Namespace, owner: dict[str, Any]) -> str:
    """Return the error message for an output name that another run uses."""
    who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner else "a run that just started"
    return (
        f"another run uses --output_name {output_name(args)} in {args.output_dir} ({who}); "
        "choose another --output_name, or stop that run first"
    )


def _open_locked(file: Path) -> IO[str] | None:
    """Open and lock a file; None when another process holds the lock. Raises OSError where locking is not supported."""
    while True:
        stream = os.fdopen(open_for_update(file), "r+", encoding="utf-8", errors="replace")  # closing it releases the lock
        try:
            locked = _lock(stream)
            if not _is_ours(stream):
                raise NotPlainError(file, "a file of another program")
        except BaseException:
            stream.close()
            raise
        if not locked:
            stream.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(file), os.fstat(stream.fileno())):
                return stream
        stream.close()  # its owner removed it meanwhile, so lock the new file of that name


def _lock(stream: IO[str]) -> bool:
    """Lock an open file without waiting; return whether that succeeded."""
    if sys.platform == "win32":
        import msvcrt

        stream.seek(_LOCKED_BYTE)
        try:
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    import fcntl

    try:
        # A record lock, because forked data-loader workers would inherit a lock of flock(2) and outlive the run with it.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_ours(stream: IO[str]) -> bool:
    """Return whether a lock file is empty or describes an owner. Another file of that name must not be overwritten."""
    stream.seek(0)
    content = stream.read(_MOST)
    return not content or bool(_description(content))


def _owner(file: Path) -> dict[str, Any]:
    try:
        with shared_reader(file) as stream:
            return _description(stream.read(_MOST).decode(errors="replace"))
    except OSError:
        return {}


def _description(content: str) -> dict[str, Any]:
    """Return host, pid and start time from the content of a lock file; empty if it has another content."""
    try:
        owner = json.loads(content)
        return {key: owner[key] for key in ("host", "pid", "since")}
    except (ValueError, RecursionError, KeyError, TypeError):
        return {}


@atexit.register
def release_all() -> None:
    """Release every lock of this process and remove its file; called at exit."""
    for file, (stream, owner) in list(_locks.items()):
        del _locks[file]
        if owner != os.getpid():  # a forked child also runs its parent's exit handlers
            continue
        with contextlib.suppress(OSError):
            file.unlink()
        stream.close()
