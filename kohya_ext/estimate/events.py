"""The memory log of a step, and its peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Kind(str, Enum):
    """The purpose of a storage."""

    WEIGHT = "weights"
    TRAINED_WEIGHT = "trained weights"
    GRADIENT = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    AVERAGE = "average of the weights"
    ACTIVATION = "saved activations"
    WEIGHT_COPY = "autocast weight copies"
    RECOMPUTED = "recomputed activations"
    TEMPORARY = "temporaries"
    TEXT_ENCODER = "text encoders"
    VAE = "vae"
    WORKSPACE = "cuBLAS workspaces"


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (``bytes`` > 0) or a free (< 0) of a storage; 0 marks the first use of optimizer state in a step."""

    storage: int
    bytes: int
    phase: str


@dataclass(frozen=True)
class Peak:
    """The highest number of bytes alive in a log."""

    bytes: int
    phase: str
    parts: dict[Kind, int]
    """Bytes by kind at the peak; they add up to ``bytes``."""


def peak(events: Sequence[Event], kinds: Sequence[Kind]) -> Peak:
    """Return the peak of a log. ``kinds[number]`` is the kind of a storage."""
    alive = highest = 0
    at = -1
    for index, event in enumerate(events):
        alive += event.bytes
        if alive > highest:
            highest, at = alive, index
    parts: Counter[Kind] = Counter()
    for event in events[: at + 1]:
        parts[kinds[event.storage]] += event.bytes
    phase = events[at].phase if at >= 0 else ""
    return Peak(highest, phase, {kind: parts[kind] for kind in Kind if parts[kind]})


def repeated(events: Sequence[Event], start: int, steps: int) -> Iterator[Event]:
    """Yield the events of a run's first steps from the log of a later one, of which ``events[:start]`` come before the step.

    The first step creates the optimizer state at its first use, and what a step does not free. Storages from before the step
    that it frees (accumulated gradients) are allocated again for the next one.
    """
    before = {event.storage: event for event in events[:start]}
    step = events[start:]
    freed = {event.storage for event in step if event.bytes < 0}
    created = {event.storage for event in step if event.bytes == 0}
    yield from (event for event in before.values() if event.storage not in created)
    numbers = 1 + max((event.storage for event in events), default=0)
    for count in range(steps):
        if count:
            yield from (replace(before[storage], storage=storage + count * numbers) for storage in freed & before.keys())
        for event in step:
            if event.bytes == 0:
                if count == 0:
                    yield replace(before[event.storage], phase=event.phase)
            elif event.storage in freed:
                yield replace(event, storage=event.storage + count * numbers)
            elif count == 0:
                yield event
