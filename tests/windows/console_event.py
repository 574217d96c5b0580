"""Announce the end of another process to it, as Windows does."""

import ctypes
from ctypes import wintypes

CTRL_C, CTRL_BREAK, CLOSE = 0, 1, 2

_QUERY_END, _END = 0x11, 0x16  # WM_QUERYENDSESSION, WM_ENDSESSION

_ALL_ACCESS = 0x1F0FFF


def send(process: int, event: int) -> None:
    """Call the handlers of a process for an event, in a new thread of that process. Raises OSError."""
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


def end_session(process: int) -> None:
    """Send the messages to the windows of a process that they get when the user signs out or Windows shuts down."""
    user32 = ctypes.WinDLL("user32")
    user32.SendNotifyMessageW.argtypes = (wintypes.HWND, wintypes.UINT, wintypes.WPARAM, wintypes.LPARAM)
    windows = []

    @ctypes.WINFUNCTYPE(wintypes.BOOL, wintypes.HWND, wintypes.LPARAM)
    def note(window: int, _: int) -> bool:
        owner = wintypes.DWORD()
        user32.GetWindowThreadProcessId(wintypes.HWND(window), ctypes.byref(owner))
        if owner.value == process:
            windows.append(window)
        return True

    user32.EnumWindows(note, 0)
    assert windows, "the process has no window"
    for window in windows:
        user32.SendNotifyMessageW(window, _QUERY_END, 0, 0)
        user32.SendNotifyMessageW(window, _END, 1, 0)
