"""Send console events to another process, as Windows does: in a new thread of that process."""

import ctypes
from ctypes import wintypes

CTRL_C, CTRL_BREAK, CLOSE, LOGOFF, SHUTDOWN = 0, 1, 2, 5, 6

_ALL_ACCESS = 0x1F0FFF


def send(process: int, event: int) -> None:
    """Call the handlers of a process for an event. Raises OSError."""
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
    kernel32.GetProcAddress.argtypes = (wintypes.HMODULE, ctypes.c_char_p)
    kernel32.OpenProcess.argtypes = (wintypes.DWORD, wintypes.BOOL, wintypes.DWORD)
    kernel32.CreateRemoteThread.argtypes = (
        *(wintypes.HANDLE, ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_void_p, ctypes.c_void_p, wintypes.DWORD, ctypes.c_void_p),
    )
    for function in (kernel32.GetProcAddress, kernel32.OpenProcess, kernel32.CreateRemoteThread):
        function.restype = ctypes.c_void_p
    # Windows starts a thread with this function, which has the same address in every process.
    routine = kernel32.GetProcAddress(ctypes.WinDLL("kernelbase")._handle, b"CtrlRoutine")
    handle = kernel32.OpenProcess(_ALL_ACCESS, False, process)
    if not (routine and handle and kernel32.CreateRemoteThread(handle, None, 0, routine, event, 0, None)):
        raise ctypes.WinError(ctypes.get_last_error())
    kernel32.CloseHandle(wintypes.HANDLE(handle))
