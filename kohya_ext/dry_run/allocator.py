"""A model of PyTorch's CUDA caching allocator: the memory that it reserves for a log of allocations.

Rules and sizes are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (no maximum split size): best fit among
small or large free blocks, blocks split and merged inside segments. Segments go back to the driver only when the GPU is full.
:class:`ExpandableAllocator` is the same with expandable segments.
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kohya_ext.dry_run.events import RELEASE, Event

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
    mapped: bool = True
    """Whether it has memory; in segments that do not expand, always."""


#: A free block after its size and address, by which free blocks are ordered.
_Row = tuple[int, int, _Block]


@dataclass
class CachingAllocator:
    """Replays allocations and frees of numbered storages."""

    limit: int | None = None
    """Bytes available for segments; None for no limit."""
    reserved: int = 0
    """Bytes in segments, ``torch.cuda.memory_reserved``."""
    most_reserved: int = 0
    """The most bytes in segments, ``torch.cuda.max_memory_reserved``."""
    allocated: int = 0
    """Bytes in blocks that are in use, ``torch.cuda.memory_allocated``: tensors with what the allocator rounds up."""
    peaks: dict[str, int] = field(default_factory=dict)
    """Most bytes allocated in each phase, in order of the phases."""
    fullest: str = ""
    """The phase in which the reserve reached :attr:`most_reserved`."""
    _free: defaultdict[tuple[int, bool], list[_Row]] = field(default_factory=lambda: defaultdict(list))
    _used: dict[int, _Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, storage: int, size: int, pool: int = 0) -> None:
        """Assign a block to a storage of ``size`` bytes. Raises MemoryError beyond the limit.

        Private pools, of CUDA graphs, are above 0 and keep their segments. Pools of streams are 0 and below.
        """
        size = rounded(max(size, 1))
        key = pool, size <= SMALL
        free = self._free[key]
        index = self._best_fit(free, size)
        block = free.pop(index)[2] if index < len(free) else self._new(size, key)
        block.free = False
        rest = block.size - size
        if self._splits(rest, key[1]):
            self._put_back(_split(block, size))
        self._used[storage] = block
        self.allocated += block.size

    def free(self, storage: int) -> None:
        """Free a storage's block and merge it with its free neighbours."""
        block = self._used.pop(storage)
        self.allocated -= block.size
        self._merge(block)

    def replay(self, events: Iterable[Event]) -> None:
        """Replay a log of events."""
        for event in events:
            if event.phase == RELEASE:
                self.release_unused(event.pool)
                continue
            if event.bytes > 0:
                before = self.most_reserved
                self.allocate(event.storage, event.bytes, event.pool)
                self.fullest = event.phase if self.most_reserved > before else self.fullest
            elif event.bytes < 0:
                self.free(event.storage)
            self.peaks[event.phase] = max(self.peaks.get(event.phase, 0), self.allocated)

    def _best_fit(self, free: Sequence[_Row], size: int) -> int:
        """Return the place of the smallest free block that is large enough; the number of blocks if there is none."""
        return bisect_left(free, (size, 0))

    def _splits(self, rest: int, small: bool) -> bool:
        """Return whether the rest of a block becomes a free block."""
        return rest >= MIN_BLOCK if small else rest > SMALL

    def _new(self, size: int, pool: tuple[int, bool]) -> _Block:
        try:
            return self._segment(size, pool)
        except MemoryError:
            self.release_unused()
            return self._segment(size, pool)

    def _segment(self, size: int, pool: tuple[int, bool]) -> _Block:
        """Return a block of at least ``size`` bytes in new memory. Raises MemoryError beyond the limit."""
        large = LARGE_SEGMENT if size < LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        length = SMALL_SEGMENT if pool[1] else large
        block = _Block(self._next_address, length, pool)
        self._reserve(length)
        self._next_address += length
        return block

    def _reserve(self, size: int) -> None:
        if self.limit is not None and self.reserved + size > self.limit:
            raise MemoryError
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)

    def release_unused(self, pool: int = 0) -> None:
        """Return unused segments to the driver: those of a private pool that ends, or for 0 those of all streams.

        The latter is ``torch.cuda.empty_cache``, and happens before an out-of-memory error.
        """
        for free in [self._free[key] for key in self._released(pool)]:
            divided = [row for row in free if row[2].before is not None or row[2].after is not None]
            self.reserved -= sum(size for size, _, _ in free) - sum(size for size, _, _ in divided)
            free[:] = divided

    def _released(self, pool: int) -> list[tuple[int, bool]]:
        return [key for key in self._free if key[0] == pool or key[0] <= pool == 0]

    def _merge(self, block: _Block) -> _Block:
        """Make a block free, merged with its free neighbours, and return the result."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._take_out(neighbour)
                block = _merged(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        self._put_back(block)
        return block

    def _put_back(self, block: _Block) -> None:
        block.free = True
        insort(self._free[block.pool], (block.size, block.address, block))

    def _take_out(self, block: _Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


class ExpandableAllocator(CachingAllocator):
    """The allocator with ``expandable_segments:True``: a range of addresses for each pool, with memory in pages where used."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._unmapped: dict[tuple[int, bool], list[_Block]] = {}
        """The ranges without memory of each pool, by address. The last is endless."""

    def _best_fit(self, free: Sequence[_Row], size: int) -> int:
        index = super()._best_fit(free, size)
        while index + 1 < len(free) and _reach(free[index + 1][2]) < _reach(free[index][2]):
            index += 1
        return index

    def _splits(self, rest: int, small: bool) -> bool:
        return rest >= MIN_BLOCK

    def _segment(self, size: int, pool: tuple[int, bool]) -> _Block:
        unmapped = self._unmapped.setdefault(pool, [_Block(0, _ENDLESS, pool, mapped=False)])
        block = next(start for start in map(_with_free_before, unmapped) if _room(start) >= size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, min(size - block.size, block.after.size))
        self._take_out(block)
        return block

    def _map(self, block: _Block, size: int) -> _Block:
        """Give memory to the first ``size`` bytes of a range, and return the free block that contains it."""
        page = SMALL_SEGMENT if block.pool[1] else LARGE_SEGMENT
        size = -(-size // page) * page
        self._reserve(size)
        ranges = self._unmapped[block.pool]
        place = ranges.index(block)
        if size < block.size:
            ranges[place] = _split(block, size)
            ranges[place].mapped = False
        else:
            del ranges[place]
        block.mapped = True
        return self._merge(block)

    def release_unused(self, pool: int = 0) -> None:
        """Return the unused pages to the driver."""
        for key in self._released(pool):
            page = SMALL_SEGMENT if key[1] else LARGE_SEGMENT
            for _, _, block in [*self._free[key]]:
                start, end = -(-block.address // page) * page, (block.address + block.size) // page * page
                if start < end:
                    self._unmap(block, start, end)

    def _unmap(self, block: _Block, start: int, end: int) -> None:
        self._take_out(block)
        if start > block.address:
            before, block = block, _split(block, start - block.address)
            self._put_back(before)
        if end < block.address + block.size:
            self._put_back(_split(block, end - block.address))
        self.reserved -= block.size
        block.mapped = block.free = False
        ranges = self._unmapped[block.pool]
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.mapped:
                ranges.remove(neighbour)
                block = _merged(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        insort(ranges, block, key=lambda each: each.address)


#: More than the addresses of any GPU.
_ENDLESS = 1 << 60


def _with_free_before(block: _Block) -> _Block:
    return block.before if block.before is not None and block.before.free else block


def _room(start: _Block) -> int:
    """Return the bytes from a block on that are free or not mapped."""
    room = 0
    block: _Block | None = start
    while block is not None and (block.free or not block.mapped):
        room += block.size
        block = block.after
    return room


def _reach(block: _Block) -> int:
    """Return the size that a free block can grow to."""
    return block.size + (block.after.size if block.after is not None and not block.after.mapped else 0)


def minimum_reserved(
    run: Callable[[CachingAllocator], object], tensors: int, reserved: int, kind: type[CachingAllocator] = CachingAllocator
) -> int:
    """Return the smallest limit in bytes that a replay runs with, to 32 MiB: between its tensors' peak and ``reserved``."""
    too_small, enough = tensors, reserved
    while enough - too_small > 32 * _MIB:
        limit = (too_small + enough) // 2
        try:
            run(kind(limit))
            enough = limit
        except MemoryError:
            too_small = limit
    return enough


def rounded(size: int) -> int:
    """Return the bytes of a block for a tensor of ``size`` bytes."""
    return -(-size // MIN_BLOCK) * MIN_BLOCK


def _split(block: _Block, size: int) -> _Block:
    """Cut a block after ``size`` bytes, and return its rest."""
    rest = _Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
    if block.after is not None:
        block.after.before = rest
    block.after, block.size = rest, size
    return rest


def _merged(first: _Block, second: _Block) -> _Block:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
