"""The smallest ratio of checkpointed blocks that fits in memory."""

from __future__ import annotations

from collections.abc import Callable

from kohya_ext.estimate.result import Estimate

#: Ratios are multiples of 1 / STEPS: SDXL's 91 blocks have between 1 and 220 MB of activations at 1024x1024.
STEPS = 16


def smallest_ratio(ask: Callable[[float], Estimate], usable: int) -> tuple[float, Estimate] | None:
    """Return the smallest ratio with which a run fits into ``usable`` bytes, and its estimate; None when none does.

    ``ask`` returns the estimate of a ratio in [0, 1]; memory must not grow with it. Calls it six times at most.
    """
    estimate = ask(1.0)
    if estimate.total > usable:
        return None
    fits, too_small = STEPS, -1
    while fits - too_small > 1:
        step = (fits + too_small) // 2
        candidate = ask(step / STEPS)
        if candidate.total <= usable:
            fits, estimate = step, candidate
        else:
            too_small = step
    return fits / STEPS, estimate
