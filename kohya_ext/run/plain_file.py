"""Open files in folders where other programs, and files of other people, may be.

Writing follows no symbolic link and changes no file with a second name (a hard link): in a folder that someone else has
prepared, such a name could stand for any file of the user. On Windows files are opened so that other processes may rename and
remove them meanwhile, which Python's ``open`` forbids: ``watch`` would otherwise block a run, and a run the user.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import IO


class NotPlainError(OSError):
    """The name stands for a symbolic link, a file with several names, a folder or a device."""

    def __init__(self, file: Path, what: str) -> None:
        """``what`` describes the file."""
        super().__init__(errno.EINVAL, f"it is {what}", str(file))


def open_for_append(file: Path) -> int:
    """Open a plain file for appending; create it if needed. Raises NotPlainError, and OSError."""
    return _opened(file, os.O_WRONLY | os.O_APPEND)


def open_for_update(file: Path) -> int:
    """Open a plain file for reading and writing; create it if needed. Raises NotPlainError, and OSError."""
    return _opened(file, os.O_RDWR)


def create(file: Path, text: str) -> None:
    """Write a new file in place of an earlier one of that name, which is removed and not followed. Raises OSError."""
    file.unlink(missing_ok=True)
    with file.open("x", encoding="utf-8") as stream:
        stream.write(text)


def shared_reader(file: Path) -> IO[bytes]:
    """Open a file for reading; other processes may rename and remove it. Raises OSError."""
    if sys.platform == "win32":
        return os.fdopen(_windows_descriptor(file, os.O_RDONLY), "rb")
    return open(file, "rb")


def _opened(file: Path, flags: int) -> int:
    if sys.platform == "win32":
        descriptor = _windows_descriptor(file, flags | os.O_CREAT)
    else:
        try:  # a pipe without a reader would block without O_NONBLOCK
            descriptor = os.open(file, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):  # the error of a symbolic link depends on the system
                raise NotPlainError(file, "a symbolic link") from None
            if error.errno == errno.ENXIO:
                raise NotPlainError(file, "a pipe or a socket without a reader") from None
            raise
    try:
        _check(file, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(file: Path, descriptor: int) -> None:
    facts = os.fstat(descriptor)
    if file.is_symlink():
        raise NotPlainError(file, "a symbolic link")
    if not stat.S_ISREG(facts.st_mode):
        raise NotPlainError(file, "a pipe or a device")
    if facts.st_nlink > 1:
        raise NotPlainError(file, "a second name of another file (a hard link)")


if sys.platform == "win32":
    import ctypes
    import msvcrt
    from ctypes import wintypes

    _READ, _WRITE = 0x80000000, 0x40000000  # GENERIC_READ, GENERIC_WRITE
    _APPEND = 0x00100084  # SYNCHRONIZE, FILE_READ_ATTRIBUTES and FILE_APPEND_DATA: each write is at the end
    _SHARE_ALL = 0x7  # reading, writing and deleting
    _OPEN_EXISTING, _OPEN_ALWAYS = 3, 4
    _OPEN_REPARSE_POINT = 0x00200000  # the link, not its target
    _create = ctypes.WinDLL("kernel32", use_last_error=True).CreateFileW
    _create.argtypes = (wintypes.LPCWSTR, *[wintypes.DWORD] * 2, wintypes.LPVOID, *[wintypes.DWORD] * 2, wintypes.HANDLE)
    _create.restype = wintypes.HANDLE

    def _windows_descriptor(file: Path, flags: int) -> int:
        access = _APPEND if flags & os.O_APPEND else _READ | (_WRITE if flags & os.O_RDWR else 0)
        how, link = (_OPEN_ALWAYS, _OPEN_REPARSE_POINT) if flags & os.O_CREAT else (_OPEN_EXISTING, 0)
        handle = _create(str(file), access, _SHARE_ALL, None, how, link, None)
        if handle == wintypes.HANDLE(-1).value:
            raise ctypes.WinError(ctypes.get_last_error())
        return msvcrt.open_osfhandle(handle, os.O_BINARY | os.O_NOINHERIT)
