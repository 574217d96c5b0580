"""End a compilation from another thread, however long its current graph would take."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: Seconds between two interruptions. PyTorch catches many errors while it compiles, so the first one may have no effect.
INTERVAL = 1.0

#: Seconds that the processes that compile have to end by themselves.
_PATIENCE = 2.0


def call_until(seconds: float, error: type[Exception], is_over: Callable[[], None], function: Callable[[], Result]) -> Result:
    """Return what ``function`` returns; after some seconds call ``is_over`` in another thread, and raise ``error`` in this one.

    The error arrives between two operations of Python (``PyThreadState_SetAsyncExc``), not while code in C runs. There a
    compilation waits for its processes, so these are ended, too.
    """
    thread, ended = threading.get_ident(), threading.Event()

    def watch() -> None:
        if ended.wait(seconds):
            return
        is_over()
        _send(thread, error)
        end_compile_workers()
        while not ended.wait(INTERVAL):
            _send(thread, error)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        try:
            return function()
        finally:
            ended.set()
    finally:
        ended.set()  # if the error came just before the other call
        watcher.join()  # where an error that has just been sent arrives


def end_compile_workers() -> None:
    """End the processes in which inductor compiles, and the waiting for them."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    if compiler is None:
        return
    processes = [pool.process for pool in compiler._pool_set if hasattr(pool, "process")]
    kill = threading.Timer(_PATIENCE, lambda: [process.kill() for process in processes])
    kill.daemon = True
    kill.start()
    try:
        compiler.shutdown_compile_workers()  # waits for their current kernels
    finally:
        kill.cancel()


def _send(thread: int, error: type[Exception]) -> None:
    """Let a thread raise an error when it next runs Python. It cannot be taken back: Python 3.11 would look for it forever."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
