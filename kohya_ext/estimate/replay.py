"""The caching allocator's memory over a run: caching, loading, and its first steps.

What a run reserves depends on its history: caching leaves cuBLAS's workspace inside a segment, and the first optimizer step
creates its state in the gaps between the tensors of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kohya_ext.estimate.allocator import CachingAllocator
from kohya_ext.estimate.events import Event, Kind
from kohya_ext.estimate.step import Log
from kohya_ext.estimate.tracker import BACKWARD

#: Steps that are replayed: the first without optimizer state, and two that reuse what the ones before have freed.
STEPS = 3


@dataclass(frozen=True)
class Memory:
    """The allocator's peaks in one part of a run, in bytes."""

    reserved: int
    allocated: Mapping[str, int]
    """By phase, in order of the phases."""


def replay(caching: Mapping[str, Log], step: Log | None = None) -> dict[str, Memory]:
    """Return the memory of each log of caching, and of the steps that follow, as ``step``."""
    allocator = CachingAllocator()
    memory = {}
    numbers = 0  # of the storages in the logs so far
    workspace: list[int] = []
    for name, log in caching.items():
        allocator.replay(_numbered(_without(log.events, _workspaces(log) if workspace else ()), numbers))
        memory[name] = Memory(allocator.reserved, {name: max(allocator.peaks.values())})
        workspace = workspace or [numbers + number for number in _workspaces(log)]
        numbers += len(log.kinds)
        allocator.keep(workspace)
        allocator.release_unused()
    if step is None:
        return memory
    known = _workspaces(step) if workspace else ()
    loading, events = ([*_without(part, known)] for part in (step.events[: step.start], step.events[step.start :]))
    resident = {event.storage: event for event in loading if event.bytes > 0}
    created = {event.storage for event in events if event.bytes == 0}
    allocator.replay(_numbered(_without(loading, created), numbers))
    allocator.release_unused()
    allocator.peaks.clear()
    once = {number for number, kind in enumerate(step.kinds) if kind is Kind.WORKSPACE}
    allocator.replay(_numbered(repeated(events, resident, once, STEPS), numbers))
    return {**memory, "step": Memory(allocator.reserved, allocator.peaks)}


def repeated(events: Collection[Event], resident: Mapping[int, Event], once: Collection[int], count: int) -> Iterator[Event]:
    """Yield the events of a run's first ``count`` steps from those of a later one.

    ``resident`` are the allocations before the step, by storage. The first step creates the optimizer state at its first use
    and the storages in ``once``. Any other storage that a step does not free replaces that of the step before, and those from
    before the step that it frees (accumulated gradients) are allocated again for the next one.
    """
    freed = {event.storage for event in events if event.bytes < 0}
    numbers = 1 + max((event.storage for event in (*resident.values(), *events)), default=0)
    for index in range(count):
        if index:
            yield from _numbered((resident[storage] for storage in freed & resident.keys()), index * numbers)
        for event in events:
            if event.bytes == 0:
                if index == 0:
                    yield Event(event.storage, resident[event.storage].bytes, event.phase)
            elif event.storage in freed:
                yield Event(event.storage + index * numbers, event.bytes, event.phase)
            elif event.storage not in once:
                yield Event(event.storage + index * numbers, event.bytes, event.phase)
                if index:
                    yield Event(event.storage + (index - 1) * numbers, -event.bytes, event.phase)
            elif index == 0:
                yield event


def _workspaces(log: Log) -> set[int]:
    """Return the storages of cuBLAS's workspace in the main thread, which exists once in a run."""
    return {event.storage for event in log.events if log.kinds[event.storage] is Kind.WORKSPACE and event.phase != BACKWARD}


def _without(events: Iterable[Event], storages: Collection[int]) -> Iterator[Event]:
    return (event for event in events if event.storage not in storages)


def _numbered(events: Iterable[Event], first: int) -> Iterator[Event]:
    return (Event(event.storage + first, event.bytes, event.phase) for event in events)
