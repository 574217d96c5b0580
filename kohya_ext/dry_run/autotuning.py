"""Memory in which inductor times the variants of a kernel, when the kernel runs for the first time.

For each variant it launches the kernel with copies of the tensors that the kernel writes in place. Between launches it flushes
the GPU's cache by writing a tensor of the cache's size. Sources: ``CachingAutotuner.bench`` in
https://github.com/pytorch/pytorch/blob/main/torch/_inductor/runtime/triton_heuristics.py and ``benchmark_gpu`` in
https://github.com/pytorch/pytorch/blob/main/torch/_inductor/runtime/benchmarking.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._prims_common import compute_required_storage_length

from kohya_ext.dry_run.allocator import rounded
from kohya_ext.dry_run.events import Event
from kohya_ext.dry_run.tracker import Tracker
from kohya_ext.patching.attributes import replaced

#: The pool of timings in logs (:func:`kohya_ext.compiling.configuration.autotune_in_own_memory`).
POOL = 2

#: Bytes that Triton's own timing writes to flush the cache of any GPU, which older versions of inductor use.
#: https://github.com/triton-lang/triton/blob/main/python/triton/testing.py (``do_bench``)
_ANY_CACHE = 256 * 2**20


@dataclass
class Timings:
    """Logs the memory of timings, once for each kernel: inductor finds the fastest variant on the disk then."""

    tracker: Tracker
    cache: int
    """Bytes of the GPU's L2 cache."""
    _timed: set[str] = field(default_factory=set)
    """The source of each kernel that has run."""

    def before_run(self, name: str, source: str, values: Sequence[Any]) -> None:
        """Log the timing of a generated kernel that is called with ``values``."""
        if source in self._timed:
            return
        self._timed.add(source)
        kernel = _autotuner(name, source)
        if len(kernel.configs) < 2:
            return
        tracker = self.tracker
        copies = _copies(kernel, values, tracker.events)
        if tracker.stream:  # a recording, whose pool the copies are in
            self._time(kernel, copies)
            return
        with tracker.in_pool(POOL):
            self._time(kernel, copies)
        tracker.release_unused(POOL)

    def _time(self, kernel: Any, copies: Sequence[int]) -> None:
        from torch._inductor.runtime.benchmarking import benchmarker

        flushed = self.cache if hasattr(type(benchmarker), "L2_cache_size") else _ANY_CACHE
        tracker = self.tracker
        for _ in kernel.configs:
            tracker.free(tracker.allocate(*copies))
            flush = tracker.allocate(flushed)
            tracker.free(tracker.allocate(*copies))
            tracker.free(flush)


def _autotuner(name: str, source: str) -> Any:
    """Return inductor's ``CachingAutotuner`` of a kernel, which knows its variants. It compiles none."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers

    with replaced(triton_helpers, "set_driver_to_gpu", lambda: None):
        return getattr(PyCodeCache.load(source), name)


def _copies(kernel: Any, values: Sequence[Any], events: Sequence[Event]) -> list[int]:
    """Return the bytes of the copy of each argument that a kernel writes in place.

    Kernels of the backward pass copy to the host instead where copies would exceed the most that was allocated so far
    (``copy_args_to_cpu_if_needed``).
    """
    tensors = zip(kernel.fn.arg_names, values, strict=False)  # without the sizes of blocks
    written = [value for name, value in tensors if name in kernel.mutated_arg_names]
    spare = _spare(events) if written and kernel.optimize_mem else None
    copies = []
    for tensor in written:
        if spare is not None:
            size = tensor.element_size() * compute_required_storage_length(tensor.shape, tensor.stride(), 0)
            if size > spare:
                continue
            spare -= size
        length = compute_required_storage_length(tensor.shape, tensor.stride(), tensor.storage_offset())
        copies.append(tensor.element_size() * length)
    return copies


def _spare(events: Sequence[Event]) -> int:
    """Return by how many bytes less than at the peak are allocated now."""
    allocated = most = 0
    for event in events:
        allocated += rounded(event.bytes) if event.bytes > 0 else -rounded(-event.bytes)
        most = max(most, allocated)
    return most - allocated
