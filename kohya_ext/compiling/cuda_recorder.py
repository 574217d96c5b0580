"""Record and replay work as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from kohya_ext.patching.attributes import replaced


class CudaRecorder:
    """CUDA graphs in one memory pool and on one stream.

    Eager work in the pool is routed there by its stream, not by its thread: autograd runs backward in other threads. torch's
    public ``use_mem_pool`` goes by thread in some releases.
    """

    @staticmethod
    def obstacle(device: torch.device) -> str | None:
        """Return why work on a device cannot be recorded; None if it can."""
        if device.type != "cuda":
            return f"the model runs on {device.type}"
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            return f"the allocator {allocator} has no pool for recordings; remove backend:{allocator} from PYTORCH_ALLOC_CONF"
        return None

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.generators: tuple[Any, ...] = (torch.cuda.default_generators[index],)
        self._index = index
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.device)
        self._held = 0
        """How often the pool was begun and not released; it is freed at 0."""

    @contextlib.contextmanager
    def in_pool(self) -> Iterator[None]:
        """Run eager work inside the block on the graphs' stream, with memory from their pool."""
        outer = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream):
            torch._C._cuda_beginAllocateCurrentStreamToPool(self._index, self._pool)
            self._held += 1
            try:
                yield
            finally:
                _end_allocating(self._index, self._pool)
                if self._held > 1:
                    torch._C._cuda_releasePool(self._index, self._pool)
                    self._held -= 1
        outer.wait_stream(self._stream)

    @contextlib.contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture the work inside the block.

        Checkpointing must not read the generator's state, which torch 2.6 forbids. Nothing is drawn between, so it is not
        needed.
        """
        graph = torch.cuda.CUDAGraph()
        # Calls in other threads, such as a data loader's pinning, do not end a capture.
        try:
            with (
                replaced(torch.utils.checkpoint, "get_device_states", lambda *args: ([], [])),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                yield graph
        except BaseException:
            self._end_broken_capture()
            raise

    def _end_broken_capture(self) -> None:
        """Undo what torch 2.6 leaves behind: the pool in use, and a generator that only draws for the capture."""
        with contextlib.suppress(RuntimeError):  # later releases have ended it
            _end_allocating(self._index, self._pool)
            torch._C._cuda_releasePool(self._index, self._pool)
        for generator in self.generators:
            generator.graphsafe_set_state(generator.clone_state())

    def free_bytes(self) -> int:
        """Return the device's free memory, as the driver reports it."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def pool_bytes(self) -> int:
        """Return the bytes of tensors in the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(each["allocated_size"] for each in segments if tuple(each["segment_pool_id"]) == self._pool)

    def return_unused(self) -> None:
        """Return the allocator's unused memory to the driver, except for the pool's."""
        torch.cuda.empty_cache()

    @staticmethod
    def new_event() -> torch.cuda.Event:
        """Return an event that marks the end of work on the current stream."""
        return torch.cuda.Event()

    def mark(self) -> tuple[float, torch.cuda.Event]:
        """Return the host's clock, and an event behind the work of the default stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.default_stream(self.device))
        return time.perf_counter(), event

    def seconds(self, start: tuple[float, torch.cuda.Event], end: tuple[float, torch.cuda.Event]) -> tuple[float, float]:
        """Return the seconds between two marks, on the host and on the GPU."""
        end[1].synchronize()
        return end[0] - start[0], start[1].elapsed_time(end[1]) / 1000

    def release(self) -> None:
        """Return the pool's memory, after all graphs have been dropped. Later work gets a new pool."""
        torch.cuda.synchronize(self.device)
        gc.collect()
        if self._held:
            torch._C._cuda_releasePool(self._index, self._pool)
            self._held = 0
            self._pool = torch.cuda.graph_pool_handle()
        torch._C._cuda_clearCublasWorkspaces()  # those of the graphs' stream are in the pool
        torch.cuda.empty_cache()


def _end_allocating(index: int, pool: tuple[int, int]) -> None:
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or torch._C._cuda_endAllocateCurrentStreamToPool  # torch 2.6
    end(index, pool)
