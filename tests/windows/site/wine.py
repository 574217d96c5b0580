"""What Wine 8 lacks and Windows has; imported at each start of Python under Wine."""

import ctypes
import msvcrt
from typing import Any

_QUERY_LIMITED_INFORMATION = 0x1000
_LONGEST_PATH = 32768

_locking = msvcrt.locking


def _lock(descriptor: int, mode: int, length: int) -> None:
    """Lock bytes of a file. Wine's error for a locked byte has no error number."""
    try:
        _locking(descriptor, mode, length)
    except OSError as error:
        if error.errno:
            raise
        raise PermissionError(13, "Permission denied") from None


msvcrt.locking = _lock


def executable(process: Any) -> str:
    """Return the path of a process's program, without the system call that psutil uses."""
    kernel32 = ctypes.WinDLL("kernel32")
    kernel32.OpenProcess.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(kernel32.OpenProcess(_QUERY_LIMITED_INFORMATION, False, process.pid))
    if not handle:
        raise PermissionError(13, "Permission denied")
    try:
        size = ctypes.c_ulong(_LONGEST_PATH)
        path = ctypes.create_unicode_buffer(size.value)
        if not kernel32.QueryFullProcessImageNameW(handle, 0, path, ctypes.byref(size)):
            raise PermissionError(13, "Permission denied")
        return path.value
    finally:
        kernel32.CloseHandle(handle)
