"""The memory log of a step, and its peaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """The purpose of a storage."""

    WEIGHT = "weights"
    TRAINED_WEIGHT = "trained weights"
    MASTER_WEIGHT = "fp32 weights"
    GRADIENT = "gradients"
    BUCKET = "communication buffers"
    GATHERED = "gathered weights"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "saved activations"
    WEIGHT_COPY = "autocast weight copies"
    RECOMPUTED = "recomputed activations"
    TEMPORARY = "temporaries"
    TEXT_ENCODER = "text encoders"
    VAE = "vae"
    WORKSPACE = "workspaces"


#: The phase of an event that returns unused segments to the driver: ``torch.cuda.empty_cache``, or the end of a private pool.
RELEASE = "release"


class Event(NamedTuple):
    """An allocation (``bytes`` > 0) or a free (< 0) of a storage. In the phase :data:`RELEASE` it is about a pool instead."""

    storage: int
    bytes: int
    phase: str
    pool: int = 0
    """The pool of an allocation: 0 of the main stream, below 0 of another one, above 0 a private one."""


@dataclass(frozen=True)
class Peak:
    """The highest number of bytes alive in a log."""

    bytes: int
    phase: str
    parts: dict[Kind, int]
    """Bytes by kind at the peak; they add up to ``bytes``."""


def peak(events: Sequence[Event], kinds: Sequence[Kind], phase: str | None = None) -> Peak:
    """Return the peak of a log, or of one phase of it. ``kinds[number]`` is the kind of a storage."""
    alive = highest = 0
    at = -1
    for index, event in enumerate(events):
        alive += event.bytes
        if alive > highest and phase in (None, event.phase):
            highest, at = alive, index
    parts: Counter[Kind] = Counter()
    for event in events[: at + 1]:
        parts[kinds[event.storage]] += event.bytes
    phase = events[at].phase if at >= 0 else ""
    return Peak(highest, phase, {kind: parts[kind] for kind in Kind if parts[kind]})
