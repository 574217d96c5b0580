"""Start this process again with its own command line, before its run has done a step.

After an illegal access a GPU does nothing more for a process, and only another process can use it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn

from kohya_ext.run import journal


def is_possible() -> bool:
    """Return whether a process can start again. On Windows its parent, such as a GUI, would take it for ended."""
    return os.name == "posix"


def start_again() -> NoReturn:
    """End the processes that this one has started, and replace it by a new one with its command line and identity."""
    journal.finish()
    for child in multiprocessing.active_children():  # a data loader's, which would wait for their parent forever
        child.kill()
        child.join()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
