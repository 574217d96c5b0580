"""Prepare data in threads ahead of a consumer, and write its results in threads behind it.

Pillow, OpenCV, torch, zlib and file writes release the global interpreter lock, so threads scale with the cores. Processes
would copy each image once more, and start slowly on Windows. Both queues are bounded, and with them the host memory.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MAX_WORKERS = 16
"""Largest default number of threads: 16 cores prepare images of one megapixel faster than a current GPU encodes them."""


def default_workers(processes: int = 1) -> int:
    """Return the number of threads for this process: its share of the cores that it may use, from 1 to 16."""
    return max(1, min(_MAX_WORKERS, available_cores() // processes))


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(
    function: Callable[[T], R], items: Iterable[T], executor: Executor, limit: int
) -> Generator[tuple[T, R], None, None]:
    """Yield ``(item, function(item))`` in the order of the items, computed by the executor's threads.

    At most ``limit`` results are computed or waiting. Raises an exception of the function in its item's turn.
    """
    remaining = iter(items)
    waiting: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in islice(remaining, limit):
            waiting.append((item, executor.submit(function, item)))
        while waiting:
            item, future = waiting.popleft()
            result = future.result()
            for following in islice(remaining, 1):
                waiting.append((following, executor.submit(function, following)))
            yield item, result
    finally:
        for _, future in waiting:
            future.cancel()


class Writer:
    """Calls functions in threads and holds back its caller when their data exceeds a limit.

    Leaving its ``with`` block waits for all calls. The first exception of a call is raised by the next :meth:`submit` or at
    the end of the block; later calls are still made, so that results of the GPU are not lost.
    """

    def __init__(self, threads: int, limit: int) -> None:
        """``limit``: bytes of data in all calls that have not ended. A single larger call is made alone."""
        self._executor = ThreadPoolExecutor(threads, "kohya_ext-writer")
        self._limit = limit
        self._held = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def submit(self, size: int, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(*args)``, which holds ``size`` bytes, in a thread. Waits while too much data is held."""
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + size <= self._limit)
            self._raise()
            self._held += size
        self._executor.submit(self._call, size, function, args)

    def _call(self, size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._executor.shutdown()
        if error is None:
            self._raise()
