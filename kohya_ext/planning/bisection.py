"""The first of several choices that fits, asked several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def first_that(count: int, hold: Callable[[Sequence[int]], Sequence[bool]], together: int = 1) -> int:
    """Return the first of ``range(count)`` that holds, as all after it do; ``count`` if none does.

    ``hold`` is asked for up to ``together`` of them at a time, in ascending order.
    """
    low, high = 0, count
    while low < high:
        asked = sorted({low + (high - low) * part // (together + 1) for part in range(1, together + 1)})
        for index, holds in zip(asked, hold(asked), strict=True):
            low, high = (low, min(high, index)) if holds else (max(low, index + 1), high)
    return low
