"""The caching allocator's memory over a run: caching, loading, and its first steps.

What a run reserves depends on its history: caching leaves cuBLAS's workspace inside a segment, and the first optimizer step
creates its state in the gaps between the tensors of a step. With CUDA graphs the first steps run eager. Then unused memory is
returned, and a step records the model: it runs eager twice and is recorded once, with memory from a private pool. Work between
steps, such as sample images, first returns this pool, unless it fits next to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from kohya_ext.estimate.allocator import CachingAllocator
from kohya_ext.estimate.events import RELEASE, Event, Kind, Peak, peak
from kohya_ext.estimate.step import LOADING, Log
from kohya_ext.estimate.tracker import BACKWARD

#: The pool of recorded passes, and the eager runs before they are recorded.
_POOL, _WARM_UPS = 1, 2

#: Steps before the one that records, of :data:`STEPS` (kohya_ext.compiling.eager_steps).
_EAGER_STEPS = 2

#: The phase of an event that stands for the recorded passes.
_PASSES = "recorded passes"

#: Steps that are replayed: the first without optimizer state, and others that reuse what the ones before have freed.
STEPS = 4


@dataclass(frozen=True)
class Memory:
    """The allocator's peaks in one part of a run, in bytes."""

    reserved: int
    allocated: Mapping[str, int]
    """By phase, in order of the phases."""


def replay(
    caching: Mapping[str, Log],
    step: Log | None = None,
    between: Mapping[str, Log] = MappingProxyType({}),
    kind: type[CachingAllocator] = CachingAllocator,
) -> dict[str, Memory]:
    """Return the memory of each log of caching, of the steps that follow, as ``step``, and of each log between later steps."""
    allocator = kind()
    memory = {}
    numbers = 0  # of the storages in the logs so far
    workspace: list[int] = []
    late: set[int] = set()
    for name, log in caching.items():
        allocator.replay(_numbered(_without(log.events, _workspaces(log) if workspace else ()), numbers))
        memory[name] = Memory(allocator.most_reserved, {name: max(allocator.peaks.values())})
        workspace = workspace or [numbers + number for number in _workspaces(log)]
        late = {numbers + event.storage for event in log.events[: log.start]} if log.leaves_late else set()
        late = {storage for storage in late if allocator.holds(storage)}
        numbers += len(log.kinds)
        allocator.keep({*workspace, *late})
        allocator.release_unused()
        allocator.forget_peaks()
    if step is None:
        return memory
    replay_steps(allocator, step, bool(workspace), numbers, late)
    memory["step"] = Memory(allocator.most_reserved, {**allocator.peaks})
    allocator.drop(_POOL)
    for name, log in between.items():
        allocator.forget_peaks()
        allocator.replay(_after_steps(log, allocator, numbers, len(step.kinds)))
        memory[name] = Memory(allocator.most_reserved, {name: max(allocator.peaks.values())})
    return memory


def _after_steps(log: Log, allocator: CachingAllocator, first: int, storages: int) -> Iterator[Event]:
    """Yield the events of a log after the replayed steps, whose storages are numbered from ``first``."""
    unused = first + STEPS * storages
    live: dict[int, int] = {}  # number in the log -> in the allocator
    for event in log.events[log.start :]:
        if event.phase == RELEASE:
            yield event
            continue
        if event.bytes < 0 and event.storage not in live:
            of_steps = (first + step * storages + event.storage for step in range(STEPS))
            held = next((number for number in of_steps if allocator.holds(number)), None)
            if held is None:  # dropped with the recordings' pool
                continue
            live[event.storage] = held
        yield event._replace(storage=live.setdefault(event.storage, unused + event.storage))


def replay_steps(
    allocator: CachingAllocator, step: Log, has_workspace: bool = False, first: int = 0, late: Iterable[int] = ()
) -> None:
    """Replay loading and the first steps of a run. Storages are numbered from ``first``.

    ``has_workspace``: whether caching has left cuBLAS's workspace of the main thread. ``late``: the storages of models that
    cached outputs and leave after loading.
    """
    parts = _parts(step, has_workspace)
    allocator.replay(_numbered(parts.loaded, first))
    for storage in late:
        allocator.free(storage)
    allocator.release_unused()
    if not any(event.phase == LOADING for event in parts.loaded):
        allocator.forget_peaks()
    steps = 0
    for event in _numbered(parts.steps(STEPS), first):
        if event.phase != _PASSES:
            allocator.replay((event,))
            continue
        if steps < _EAGER_STEPS:
            _run_eager(allocator, [*_numbered(parts.passes, -parts.storages)], steps > 0, parts)
        elif steps == _EAGER_STEPS:
            allocator.release_unused()
            _record(allocator, [*_numbered(parts.passes, first)], {first + number for number in parts.workspaces})
        steps += 1


def tensor_peak(step: Log) -> Peak:
    """Return the peak of a step's tensors: with CUDA graphs of one that runs eager or records, or of a later one."""
    if step.recording is None:
        return peak(step.events, step.kinds)
    parts = _parts(step, has_workspace=False)
    kept = _kept(parts.passes)
    recording = [*parts.loading, *parts.before, *parts.passes, *parts.after]
    later = [*parts.loading, *(event for event in parts.passes if event.storage in kept), *parts.before, *parts.after]
    return max((peak(log, step.kinds) for log in (recording, later)), key=lambda each: each.bytes)


@dataclass(frozen=True)
class _Parts:
    """The events of a run: before the first step, and in each step around the passes that are recorded once."""

    loading: Sequence[Event]
    before: Sequence[Event]
    passes: Sequence[Event]
    after: Sequence[Event]
    once: Collection[int]
    """The storages that only the first step creates."""
    workspaces: Collection[int]
    storages: int
    """The number of storages in the log."""
    replaces: Mapping[int, Sequence[int]]
    """As :attr:`Log.replaces`."""

    @property
    def loaded(self) -> list[Event]:
        """The events before the first step, which creates the optimizer state."""
        created = {event.storage for event in chain(self.before, self.after) if event.bytes == 0}
        return [*_without(self.loading, created)]

    def steps(self, count: int) -> Iterator[Event]:
        """Yield the events of the first steps, with one event for the recorded passes."""
        resident = {event.storage: event for event in self.loading if event.bytes > 0}
        passes = [Event(0, 0, _PASSES)] if self.passes else []
        return repeated([*self.before, *passes, *self.after], resident, self.once, count, self.storages, self.replaces)


def _parts(step: Log, has_workspace: bool) -> _Parts:
    events, recording = step.events, step.recording
    workspaces = {number for number, kind in enumerate(step.kinds) if kind is Kind.WORKSPACE}
    known = _workspaces(step) if has_workspace else set()
    if recording is None:
        loading, before = ([*_without(part, known)] for part in (events[: step.start], events[step.start :]))
        return _Parts(loading, before, (), (), workspaces, workspaces, len(step.kinds), step.replaces)
    inside = {event.storage for event in events[recording.start : recording.end] if event.bytes > 0}
    static = [*events[recording.inputs : recording.start], *events[recording.end : recording.staged]]
    # The staging buffers are allocated before the recording.
    outside = (events[: step.start], [*events[step.start : recording.start], *events[recording.end : recording.staged]])
    loading, before, after = ([*_without(part, inside | known)] for part in (*outside, events[recording.staged :]))
    passes = [event for event in events[recording.start : recording.end] if event.storage in inside]
    once = workspaces | {event.storage for event in static if event.bytes > 0}
    return _Parts(loading, before, passes, after, once, workspaces, len(step.kinds), step.replaces)


def _run_eager(allocator: CachingAllocator, passes: Sequence[Event], again: bool, parts: _Parts) -> None:
    """Replay the passes of an eager step, numbered below 0. Its workspaces exist from the first one on."""
    workspaces = _kept(passes) & {number - parts.storages for number in parts.workspaces}
    allocator.replay(_without(passes, workspaces if again else ()))
    for storage in _kept(passes) - workspaces:
        allocator.free(storage)


def _record(allocator: CachingAllocator, passes: Sequence[Event], workspaces: Collection[int]) -> None:
    """Replay the passes in their pool: eager, and recorded."""
    kept = _kept(passes)
    once = kept & {*workspaces}
    allocator.pool = _POOL
    for index in range(_WARM_UPS):
        allocator.replay(_without(passes, once if index else ()))
        for storage in kept - once:
            allocator.free(storage)
    allocator.release_unused()
    allocator.replay(_without(passes, once))
    allocator.pool = 0


def _kept(passes: Iterable[Event]) -> set[int]:
    """Return the storages that the events allocate and do not free."""
    kept: set[int] = set()
    for event in passes:
        (kept.add if event.bytes > 0 else kept.discard)(event.storage)
    return kept


def repeated(
    events: Collection[Event],
    resident: Mapping[int, Event],
    once: Collection[int],
    count: int,
    storages: int,
    replaces: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> Iterator[Event]:
    """Yield the events of a run's first ``count`` steps from those of a later one, which has ``storages``.

    A storage of step n has its number plus n times ``storages``. ``resident`` are the allocations before the step, by storage.
    The first step creates the optimizer state at its first use and the storages in ``once``. Any other storage that a step does
    not free replaces that of the step before, or is replaced as ``replaces`` says (:attr:`Log.replaces`). Those from before
    the step that it frees (accumulated gradients) are allocated again for the next one.
    """
    freed = {event.storage for event in events if event.bytes < 0}
    sizes = {event.storage: event.bytes for event in events if event.bytes > 0}
    left = sizes.keys() - freed - {*once}
    replaced = {storage: [storage] for storage in left - {*chain.from_iterable(replaces.values())}} | {
        new: [storage for storage in old if storage in left] for new, old in replaces.items()
    }
    for index in range(count):
        if index:
            yield from _numbered((resident[storage] for storage in freed & resident.keys()), index * storages)
        for event in events:
            if event.phase == _PASSES:
                yield event
            elif event.bytes == 0:
                if index == 0:
                    yield event._replace(bytes=resident[event.storage].bytes)
            elif event.storage in once and event.storage not in freed:
                if index == 0:
                    yield event
            else:
                yield event._replace(storage=event.storage + index * storages)
                if index and event.bytes > 0:
                    for storage in replaced.get(event.storage, ()):
                        yield Event(storage + (index - 1) * storages, -sizes[storage], event.phase)


def _workspaces(log: Log) -> set[int]:
    """Return the storages of cuBLAS's workspace in the main thread, which exists once in a run."""
    kept = _kept(log.events)  # not the memory that an operator uses while it runs
    used = (event for event in log.events if event.storage in kept and event.phase != BACKWARD)
    return {event.storage for event in used if log.kinds[event.storage] is Kind.WORKSPACE}


def _without(events: Iterable[Event], storages: Collection[int]) -> Iterator[Event]:
    return (event for event in events if event.storage not in storages)


def _numbered(events: Iterable[Event], first: int) -> Iterator[Event]:
    return (event._replace(storage=event.storage + first) for event in events)
