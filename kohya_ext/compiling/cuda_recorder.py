"""Record and replay work as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
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
        return None if device.type == "cuda" else f"the model runs on {device.type}"

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

    def used_bytes(self) -> int:
        """Return the bytes of all tensors in the allocator's memory."""
        return int(torch.cuda.memory_allocated(self.device))

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
