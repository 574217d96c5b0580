"""Escape sequences in consoles of Windows, which print them as text until a program turns them on.

See https://learn.microsoft.com/windows/console/console-virtual-terminal-sequences
"""

from __future__ import annotations

import sys

_STANDARD_OUTPUT, _VIRTUAL_TERMINAL = -11, 0x4  # STD_OUTPUT_HANDLE, ENABLE_VIRTUAL_TERMINAL_PROCESSING


def turn_on_escape_sequences() -> bool:
    """Return whether the terminal of standard output interprets escape sequences now; True if it is not a console of Windows.

    Consoles of Windows 8, and of newer ones with "Use legacy console", cannot.
    """
    if sys.platform == "win32":
        import ctypes
        from ctypes import wintypes

        kernel32, mode = ctypes.WinDLL("kernel32"), wintypes.DWORD()
        kernel32.GetStdHandle.restype = wintypes.HANDLE
        output = wintypes.HANDLE(kernel32.GetStdHandle(_STANDARD_OUTPUT))
        if kernel32.GetConsoleMode(output, ctypes.byref(mode)):
            return bool(kernel32.SetConsoleMode(output, mode.value | _VIRTUAL_TERMINAL))
    return True
