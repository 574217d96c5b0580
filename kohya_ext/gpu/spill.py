"""Recognise a step that is slow because the driver has moved memory of the run to the host. Nothing here imports torch.

Where a card has no end (Windows, and WSL on it), an allocation that does not fit the card succeeds: the driver takes system
memory, which the GPU reads over the bus. Nothing says so; a step just takes ten to fifty times as long. Two signs together tell
it from a slow disk or another program's work: the card is full, and the steps are slow. And one alone is proof: the allocator
holds more than the card has.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field

from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.units import gigabytes

#: How many times longer than the fastest step.
SLOWER = 4.0

#: So many of the last steps are looked at, by their median: saving and sampling make single ones long.
STEPS = 5

#: A card with less than this share free is full.
FULL = 0.02


def may_spill() -> bool:
    """Return whether the driver of this system gives out more memory than the card has."""
    return sys.platform == "win32" or "microsoft" in platform.uname().release.lower()


@dataclass
class Watch:
    """Looks at every step of a run."""

    total: int
    """Bytes of the card."""
    best: float = float("inf")
    """Seconds of the fastest step but the last few."""
    _last: deque[float] = field(default_factory=deque)

    def after_step(self, seconds: float, reserved: int, free: int) -> str | None:
        """Take a step's time, what the allocator holds and what the driver says is free; return what is wrong, if anything."""
        self._last.append(seconds)
        if len(self._last) > STEPS:
            self.best = min(self.best, self._last.popleft())
        usual = statistics.median(self._last)
        holds = f"this run holds {gigabytes(reserved)} GB on a card of {gigabytes(self.total)} GB"
        if reserved + CONTEXT_BYTES > self.total:
            return f"{holds}, so that a part of it lies in the host's memory: a step takes {usual:.1f} s"
        if usual > SLOWER * self.best and free < FULL * self.total:
            slow = f"steps take {usual:.1f} s, and the fastest one took {self.best:.1f} s"
            return f"{slow}; {holds}, and {gigabytes(free)} are free: the driver has moved memory to the host"
        return None
