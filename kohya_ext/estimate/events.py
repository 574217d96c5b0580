"""The log of a step, and what can be read from it: the peak, what it is made of, and what an allocator reserves for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What a storage is for."""

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


@dataclass(frozen=True, slots=True)
class Event:
    """A storage comes (``bytes`` > 0) or goes (< 0)."""

    storage: int
    bytes: int
    phase: str


@dataclass(frozen=True)
class Peak:
    """The moment with the most bytes alive."""

    bytes: int
    phase: str
    parts: dict[Kind, int]
    """Bytes by kind at that moment; they add up to ``bytes``."""


def peak(events: Sequence[Event], kinds: Sequence[Kind]) -> Peak:
    """Return the peak of a log. ``kinds`` gives each storage's kind by its number."""
    alive = most = 0
    at = -1
    for index, event in enumerate(events):
        alive += event.bytes
        if alive > most:
            most, at = alive, index
    parts: Counter[Kind] = Counter()
    for event in events[: at + 1]:
        parts[kinds[event.storage]] += event.bytes
    phase = events[at].phase if at >= 0 else ""
    return Peak(most, phase, {kind: parts[kind] for kind in Kind if parts[kind]})


def peak_by_phase(events: Sequence[Event], alive: int = 0) -> dict[str, int]:
    """Return the most bytes alive in each phase, in the order in which the phases come, ``alive`` of them before."""
    most: dict[str, int] = {}
    for event in events:
        alive += event.bytes
        most[event.phase] = max(most.get(event.phase, 0), alive)
    return most
