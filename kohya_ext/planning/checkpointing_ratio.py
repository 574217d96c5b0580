"""The smallest ratio of checkpointed blocks that fits in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kohya_ext.estimate.result import Estimate
from kohya_ext.planning.bisection import first_that

#: Ratios are multiples of 1 / STEPS: SDXL's 91 blocks have between 1 and 220 MB of activations at 1024x1024.
STEPS = 16


def smallest_ratio(
    ask: Callable[[Sequence[float]], Sequence[Estimate]], usable: int, together: int = 1
) -> tuple[float, Estimate] | None:
    """Return the smallest ratio with which a run fits into ``usable`` bytes, and its estimate; None when none does.

    ``ask`` returns the estimates of up to ``together`` ratios in [0, 1]; memory must not grow with them.
    """
    known: dict[int, Estimate] = {}

    def fit(steps: Sequence[int]) -> list[bool]:
        known.update(zip(steps, ask([step / STEPS for step in steps]), strict=True))
        return [known[step].total <= usable for step in steps]

    if not fit([STEPS])[0]:
        return None
    step = first_that(STEPS, fit, together)
    return step / STEPS, known[step]
