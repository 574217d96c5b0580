"""A lock on an output name, so that two runs never write the same files.

The lock is the operating system's own, on a hidden file in the output folder: it ends with its process, however that ends,
so a lock is never stale. The file names its owner for whoever is refused.
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

from kohya_ext.console import note, warn
from kohya_ext.errors import UserError
from kohya_ext.run.atomic_write import PARTIAL, remove, shortened
from kohya_ext.run.output_files import DEFAULT_NAME, unfinished

_FAR = 1 << 30
"""The byte that is locked on Windows, where a locked byte cannot be read by others: far behind the owner's description."""

_held: dict[Path, tuple[IO[str], int]] = {}
"""The locks that are held: the open file, and the process that locked it, since a forked child holds none of its parent's.

Nothing else in this process may open such a file: closing it again would end the lock (fcntl(2), "record locks").
"""


def lock_file(args: Namespace) -> Path | None:
    """Return the lock file for a run's output name; None where the run writes nothing or to a folder that is not there."""
    folder = getattr(args, "output_dir", None)
    if not folder or getattr(args, "debug_dataset", False) or not Path(folder).is_dir():
        return None
    output = Path(folder).resolve() / (getattr(args, "output_name", None) or DEFAULT_NAME)
    return output.with_name(f".{shortened(output.name)}.lock")


def claim(args: Namespace) -> None:
    """Take the lock on a run's output name until this process ends, and remove what a killed run left half-written there.

    Raises UserError that names the other run when one holds it.
    """
    if getattr(args, "output_dir", None) and not getattr(args, "debug_dataset", False):
        with contextlib.suppress(OSError):  # preflight reports a folder that cannot be made
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    file = lock_file(args)
    if file is None or file in _held:
        return
    try:
        stream = _open_locked(file)
    except OSError as error:
        warn(f"cannot lock {file}: {error.strerror or error}; do not start a second run with this output name")
        return
    if stream is None:
        raise UserError(in_use(args, _owner(file)))
    stream.seek(0)
    stream.truncate()
    json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}, stream)
    stream.flush()
    _held[file] = stream, os.getpid()
    for path in unfinished(file.parent, getattr(args, "output_name", None), PARTIAL):
        remove(path)
        note(f"removed {path.name}: a killed run left it half-written")


def other_run(args: Namespace) -> dict[str, Any] | None:
    """Return the owner of a run's output name when another process holds the lock: host, pid, since. Changes nothing."""
    file = lock_file(args)
    if file is None or file in _held or not file.is_file():
        return None
    try:
        stream = _open_locked(file)
    except OSError:
        return None
    if stream is None:
        return _owner(file)
    stream.close()
    return None


def in_use(args: Namespace, owner: dict[str, Any]) -> str:
    """Return the error for an output name that another run is writing to."""
    name = getattr(args, "output_name", None) or DEFAULT_NAME
    who = f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner else "a run that just started"
    return (
        f"another run is training --output_name {name} in {args.output_dir} ({who}): "
        "choose another --output_name, or stop that run first"
    )


def _open_locked(file: Path) -> IO[str] | None:
    """Open and lock a file; None when another process holds it. Raises OSError where nothing can be locked."""
    while True:
        stream = open(file, "a+", encoding="utf-8")  # noqa: SIM115 - stays open as long as the lock is held
        try:
            held = _lock(stream)
        except BaseException:
            stream.close()
            raise
        if not held:
            stream.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(file), os.fstat(stream.fileno())):
                return stream
        stream.close()  # its owner removed it in between: lock the file that has the name now


def _lock(stream: IO[str]) -> bool:
    """Lock an open file without waiting; return whether it worked."""
    if sys.platform == "win32":
        import msvcrt

        stream.seek(_FAR)
        try:
            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True
    import fcntl

    try:
        # A record lock: forked data-loader workers do not inherit it, as they would inherit flock's and keep it.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _owner(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


@atexit.register
def release_all() -> None:
    """Give up every lock of this process and remove its file; done when the process ends."""
    for file, (stream, owner) in list(_held.items()):
        del _held[file]
        if owner != os.getpid():  # a forked child that runs its parent's exit handlers
            continue
        if sys.platform == "win32":  # where an open file cannot be removed
            stream.close()
        with contextlib.suppress(OSError):
            file.unlink()
        stream.close()
