"""How Windows announces the end of a process: its console window is closed, the user signs out, or the computer shuts down.

A closed window calls a handler in a thread of its own. Windows ends the process when that returns, or after
:data:`SECONDS`. A process that has loaded ``user32.dll``, as PyTorch does, gets no such event when the session ends; only its
windows get a message, hence the hidden one. See https://learn.microsoft.com/en-us/windows/console/handlerroutine
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from typing import Any

SECONDS = 5.0
"""Seconds until Windows ends the process."""

_CLOSED = 2
"""CTRL_CLOSE_EVENT"""

_REASON = "Saving the state of a training run"
"""What Windows shows while it waits."""

Action = Callable[[str], None]


def handle(action: Action) -> Callable[[], None]:
    """Call ``action(description)`` in another thread when Windows is about to end the process; elsewhere do nothing.

    Returns a function that undoes it.
    """
    if sys.platform == "win32":
        undo = (_on_closed_console(action), _on_end_of_session(action))

        def stop() -> None:
            for each in undo:
                each()

        return stop
    return _nothing


def _nothing() -> None:
    """Do nothing."""


if sys.platform == "win32":
    import ctypes
    from ctypes import wintypes

    _QUERY_END, _END, _QUIT = 0x11, 0x16, 0x12  # WM_QUERYENDSESSION, WM_ENDSESSION, WM_QUIT
    _MESSAGE = (wintypes.HWND, wintypes.UINT, wintypes.WPARAM, wintypes.LPARAM)
    _Procedure = ctypes.WINFUNCTYPE(ctypes.c_ssize_t, *_MESSAGE)
    _Handler = ctypes.WINFUNCTYPE(wintypes.BOOL, wintypes.DWORD)
    _numbers = itertools.count()

    class _WindowClass(ctypes.Structure):
        """The structure WNDCLASSW."""

        _fields_ = [
            ("style", wintypes.UINT),
            ("procedure", _Procedure),
            ("class_bytes", ctypes.c_int),
            ("window_bytes", ctypes.c_int),
            ("instance", wintypes.HINSTANCE),
            ("icon", wintypes.HANDLE),
            ("cursor", wintypes.HANDLE),
            ("background", wintypes.HANDLE),
            ("menu", wintypes.LPCWSTR),
            ("name", wintypes.LPCWSTR),
        ]

    def _on_closed_console(action: Action) -> Callable[[], None]:
        def on_event(event: int) -> bool:
            if event != _CLOSED:
                return False  # Ctrl-C and Ctrl-Break: Python's own signals
            action("the console window was closed")
            return True

        handler, set_handler = _Handler(on_event), ctypes.WinDLL("kernel32").SetConsoleCtrlHandler
        set_handler(handler, True)
        return lambda: set_handler(handler, False) and None

    def _on_end_of_session(action: Action) -> Callable[[], None]:
        user32 = _user32()

        def on_message(window: int, message: int, ends: int, how: int) -> int:
            if message == _QUERY_END:
                user32.ShutdownBlockReasonCreate(window, _REASON)
            elif message == _END and ends:
                action("Windows ends the session")
            elif message == _END:  # another program has kept Windows from it
                user32.ShutdownBlockReasonDestroy(window)
            return int(user32.DefWindowProcW(window, message, ends, how))

        thread = threading.Thread(target=_run_window, args=(user32, _Procedure(on_message)), daemon=True)
        thread.start()
        return lambda: user32.PostThreadMessageW(thread.native_id, _QUIT, 0, 0) and None

    def _user32() -> Any:
        user32 = ctypes.WinDLL("user32")
        user32.DefWindowProcW.argtypes, user32.DefWindowProcW.restype = _MESSAGE, ctypes.c_ssize_t
        user32.CreateWindowExW.argtypes = (
            *(wintypes.DWORD, wintypes.LPCWSTR, wintypes.LPCWSTR, wintypes.DWORD),
            *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            *(wintypes.HWND, wintypes.HMENU, wintypes.HINSTANCE, wintypes.LPVOID),
        )
        user32.CreateWindowExW.restype = wintypes.HWND
        user32.ShutdownBlockReasonCreate.argtypes = (wintypes.HWND, wintypes.LPCWSTR)
        user32.ShutdownBlockReasonDestroy.argtypes = (wintypes.HWND,)
        return user32

    def _run_window(user32: Any, procedure: Any) -> None:
        """Create a window that is never shown, and handle its messages until the thread gets WM_QUIT."""
        name = f"kohya_ext_{next(_numbers)}"
        user32.RegisterClassW(ctypes.byref(_WindowClass(procedure=procedure, name=name)))
        user32.CreateWindowExW(0, name, name, 0, 0, 0, 0, 0, None, None, None, None)
        message = wintypes.MSG()
        while user32.GetMessageW(ctypes.byref(message), None, 0, 0) > 0:
            user32.DispatchMessageW(ctypes.byref(message))
