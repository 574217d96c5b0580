"""The lengths of the texts of a batch."""

from __future__ import annotations

from collections.abc import Sequence


def are_equal(lengths: Sequence[int]) -> bool:
    """Return whether all texts of a batch have the same length, in tokens.

    Patches ask here, because an estimate assumes different lengths for several texts: masks then remain.
    """
    return len(set(lengths)) == 1
