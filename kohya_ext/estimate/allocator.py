"""A model of PyTorch's CUDA caching allocator: the memory that it reserves for a log of allocations.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments, no maximum
split size): best fit among small or large free blocks, blocks split and merged inside segments. Segments go back to the driver
only when the GPU is full.
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from kohya_ext.estimate.events import RELEASE, Event

_KIB, _MIB = 2**10, 2**20
#: Every size is a multiple of this.
MIN_BLOCK = 512
#: Largest tensor in the pool of small segments.
SMALL = 1 * _MIB
SMALL_SEGMENT = 2 * _MIB
#: Smallest tensor that gets a segment to itself.
LARGE = 10 * _MIB
LARGE_SEGMENT = 20 * _MIB
ROUND_LARGE = 2 * _MIB


@dataclass(eq=False, slots=True)
class _Block:
    address: int
    size: int
    pool: tuple[int, bool]
    """The number of the pool, and whether it is of small segments."""
    free: bool = False
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class CachingAllocator:
    """Replays allocations and frees of numbered storages."""

    limit: int | None = None
    """Bytes available for segments; None for no limit."""
    reserved: int = 0
    """Bytes in segments, ``torch.cuda.memory_reserved``."""
    most_reserved: int = 0
    """The most bytes in segments since :meth:`forget_peaks`, ``torch.cuda.max_memory_reserved``."""
    allocated: int = 0
    """Bytes in blocks that are in use, ``torch.cuda.memory_allocated``: tensors with what the allocator rounds up."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes allocated in each phase since :meth:`forget_peaks`, in order of the phases."""
    pool: int = 0
    """The pool that tensors are allocated in. Private pools, of CUDA graphs, are other than 0 and keep their segments."""
    _free: defaultdict[tuple[int, bool], list[tuple[int, int, _Block]]] = field(default_factory=lambda: defaultdict(list))
    _used: dict[int, _Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, storage: int, size: int) -> None:
        """Assign a block to a storage of ``size`` bytes. Raises MemoryError beyond the limit."""
        size = -(-max(size, 1) // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL
        free = self._free[self.pool, small]
        index = bisect_left(free, (size, 0))
        block = free.pop(index)[2] if index < len(free) else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL:
            remainder = _Block(block.address + size, rest, block.pool, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remainder
            block.after, block.size = remainder, size
            self._put_back(remainder)
        self._used[storage] = block
        self.allocated += block.size

    def free(self, storage: int) -> None:
        """Free a storage's block and merge it with its free neighbours."""
        block = self._used.pop(storage)
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take_out(neighbour)
                block = _merged(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        self._put_back(block)

    def holds(self, storage: int) -> bool:
        """Return whether a storage has a block."""
        return storage in self._used

    def replay(self, events: Iterable[Event]) -> None:
        """Replay a log of events."""
        for event in events:
            if event.phase == RELEASE:
                self.release_unused()
                continue
            if event.bytes > 0:
                self.allocate(event.storage, event.bytes)
            elif event.bytes < 0:
                self.free(event.storage)
            self.peaks[event.phase] = max(self.peaks.get(event.phase, 0), self.allocated)

    def forget_peaks(self) -> None:
        """Measure peaks from now on: ``torch.cuda.reset_peak_memory_stats``."""
        self.peaks.clear()
        self.most_reserved = self.reserved

    def keep(self, storages: Collection[int]) -> None:
        """Free all storages but these."""
        for storage in self._used.keys() - {*storages}:
            self.free(storage)

    def _segment(self, size: int, small: bool) -> _Block:
        large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        length = SMALL_SEGMENT if small else large
        block = _Block(self._next_address, length, (self.pool, small))
        if self.limit is not None and self.reserved + length > self.limit:
            self.release_unused()
            if self.reserved + length > self.limit:
                raise MemoryError
        self._next_address += length
        self.reserved += length
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def release_unused(self) -> None:
        """Return unused segments to the driver: ``torch.cuda.empty_cache``, and before an out-of-memory error."""
        for free in (self._free[0, True], self._free[0, False]):
            unused = [row for row in free if row[2].before is None and row[2].after is None]
            self.reserved -= sum(size for size, _, _ in unused)
            free[:] = [row for row in free if row not in unused]

    def _put_back(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _take_out(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


def minimum_reserved(run: Callable[[CachingAllocator], object], tensors: int, reserved: int) -> int:
    """Return the smallest limit in bytes that a replay runs with, to 32 MiB: between its tensors' peak and ``reserved``."""
    too_small, enough = tensors, reserved
    while enough - too_small > 32 * _MIB:
        limit = (too_small + enough) // 2
        try:
            run(CachingAllocator(limit))
            enough = limit
        except MemoryError:
            too_small = limit
    return enough


def _merged(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
