"""Console events of Windows: its window is closed, the user logs off, or the computer shuts down.

Windows calls a handler in a thread of its own and ends the process when that returns, or after
:data:`SECONDS`. See https://learn.microsoft.com/en-us/windows/console/handlerroutine
"""

from __future__ import annotations

import sys
from collections.abc import Callable

SECONDS = 5.0
"""Seconds until Windows ends a process whose window was closed."""

_EVENTS = {2: "the console window was closed", 5: "the user logs off", 6: "Windows shuts down"}


def _nothing() -> None:
    """Do nothing."""


def handle(action: Callable[[str], None]) -> Callable[[], None]:
    """Call ``action(description)`` in another thread when the process is about to be ended; only on Windows.

    Returns a function that undoes it.
    """
    if sys.platform != "win32":
        return _nothing
    import ctypes
    from ctypes import wintypes

    @ctypes.WINFUNCTYPE(wintypes.BOOL, wintypes.DWORD)
    def on_event(event: int) -> bool:
        if event not in _EVENTS:
            return False  # Ctrl-C and Ctrl-Break: Python's own signals
        action(_EVENTS[event])
        return True

    set_handler = ctypes.WinDLL("kernel32").SetConsoleCtrlHandler
    set_handler(on_event, True)
    return lambda: set_handler(on_event, False) and None
