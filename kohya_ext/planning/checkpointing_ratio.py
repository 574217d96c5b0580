"""Spend the memory a card has left on not computing twice: the smallest share of checkpointed blocks that fits."""

from __future__ import annotations

from collections.abc import Callable

from kohya_ext.estimate.result import Estimate

#: Shares are tried in steps of one in so many: SDXL's 91 blocks weigh between 1 and 220 MB at 1024x1024.
STEPS = 16


def smallest_ratio(ask: Callable[[float], Estimate], room: int) -> tuple[float, Estimate] | None:
    """Return the smallest share with which a run fits into ``room`` bytes, and its estimate; None when none does.

    ``ask`` gives the estimate of a share in [0, 1]; fewer checkpointed blocks never need less. Asks six times at most.
    """
    found = ask(1.0)
    if found.on_the_card > room:
        return None
    fits, too_small = STEPS, -1
    while fits - too_small > 1:
        share = (fits + too_small) // 2
        tried = ask(share / STEPS)
        if tried.on_the_card <= room:
            fits, found = share, tried
        else:
            too_small = share
    return fits / STEPS, found
