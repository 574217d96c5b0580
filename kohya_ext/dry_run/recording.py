"""Recorded passes of a dry run: the model of ``--cuda_graphs``, with a recorder that only counts memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kohya_ext.compiling import cuda_recorder, graphs, host_access
from kohya_ext.dry_run.device import GPU
from kohya_ext.dry_run.gpu_tracker import GpuTracker

#: The pool and the stream of recordings, as in logs.
POOL = STREAM = 1

#: More memory than any GPU has, in bytes: recordings are not given up.
_FREE = 2**60


def install(tracker: GpuTracker) -> None:
    """Record on no GPU for the rest of the process. Values, which tensors here have none of, are not compared."""
    _Recorder.tracker = tracker
    cuda_recorder.CudaRecorder = _Recorder  # type: ignore[assignment,misc]
    graphs._host_random_state = lambda device: ()
    graphs._difference = lambda *_: 0.0
    host_access.HostAccess._access = lambda *_: None  # type: ignore[method-assign]


class _Recorder:
    """Allocates in the recordings' pool; a replay does nothing."""

    tracker: ClassVar[GpuTracker]
    device, generators = GPU, ()

    def __init__(self, device: object) -> None: ...

    @staticmethod
    def obstacle(device: object) -> None: ...
    @staticmethod
    def new_event() -> Any:
        return torch.cuda.Event()

    @contextmanager
    def in_pool(self) -> Iterator[None]:
        tracker = self.tracker
        before, tracker.stream = tracker.stream, STREAM
        try:
            with tracker.in_pool(POOL):
                yield
        finally:
            tracker.stream = before

    @contextmanager
    def record(self) -> Iterator[Any]:
        kernels = self.tracker.kernels
        with self.in_pool():
            yield SimpleNamespace(replay=lambda: None)
        self.tracker.recorded_kernels += self.tracker.kernels - kernels

    def free_bytes(self) -> int:
        return _FREE

    def pool_bytes(self) -> int:
        begun = {event.storage for event in self.tracker.events if event.pool == POOL}
        return sum(event.bytes for event in self.tracker.events if event.storage in begun)

    def return_unused(self) -> None:
        self.tracker.release_unused()

    def release(self) -> None:
        self.tracker.release_unused()

    def mark(self) -> None: ...

    def seconds(self, start: None, end: None) -> tuple[float, float]:
        return 0.0, 0.0
