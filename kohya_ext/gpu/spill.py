"""Detects slow steps caused by GPU memory that the driver moved to the host. Nothing here imports torch.

On Windows and WSL the driver silently spills to system memory, which the GPU reads over the bus: a step takes ten to fifty
times as long. Slow steps on a full GPU are a spill; with free memory they have another cause, such as a slow disk. More
reserved memory than the GPU has is always a spill.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections import deque
from dataclasses import dataclass, field

from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.units import gigabytes

#: A slow step takes this many times as long as the fastest one.
SLOWDOWN = 4.0

#: Number of last steps in the median: saving and sampling make single steps slow.
STEPS = 5

#: A GPU with less than this fraction free is full.
FULL = 0.02


def may_spill() -> bool:
    """Return whether this system's driver can allocate more memory than the GPU has."""
    return sys.platform == "win32" or "microsoft" in platform.uname().release.lower()


@dataclass
class SpillDetector:
    """Checks every step of a run."""

    total: int
    """Bytes of the GPU."""
    fastest: float = float("inf")
    """Seconds of the fastest step before the last :data:`STEPS`."""
    _last: deque[float] = field(default_factory=deque)

    def after_step(self, seconds: float, reserved: int, free: int) -> str | None:
        """Return a warning, or None, for a step's time and the allocator's reserved and the GPU's free bytes."""
        self._last.append(seconds)
        if len(self._last) > STEPS:
            self.fastest = min(self.fastest, self._last.popleft())
        median = statistics.median(self._last)
        reserve = f"this run reserves {gigabytes(reserved)} GB on a GPU of {gigabytes(self.total)} GB"
        if reserved + CONTEXT_BYTES > self.total:
            return f"{reserve}, so part of it is in host memory: a step takes {median:.1f} s"
        if median > SLOWDOWN * self.fastest and free < FULL * self.total:
            slow = f"steps take {median:.1f} s, the fastest took {self.fastest:.1f} s"
            return f"{slow}: {reserve} with {gigabytes(free)} GB free, so the driver has moved memory to the host"
        return None
