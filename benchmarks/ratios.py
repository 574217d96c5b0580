"""Statistics of a comparison: medians, ratios of medians, and their spread over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Rounds = Sequence[Sequence[float]]
"""Seconds of each sample, by round."""


@dataclass(frozen=True)
class Ratio:
    """Speed relative to the baseline; above 1 is faster."""

    of_medians: float
    """Baseline's median over the variant's, over all samples."""
    lowest: float
    """Lowest ratio within one round."""
    highest: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.of_medians:.2f}x ({self.lowest:.2f} to {self.highest:.2f})"


def pooled(rounds: Rounds) -> list[float]:
    """Return the samples of all rounds."""
    return [sample for samples in rounds for sample in samples]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile; of a single sample, itself twice. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    if len(samples) == 1:
        return samples[0], samples[0]
    lower, _, upper = quantiles(samples, n=4, method="inclusive")
    return lower, upper


def ratio(baseline: Rounds, variant: Rounds) -> Ratio:
    """Compare two variants measured in the same rounds; a round that only one of them finished is left out.

    Raises ValueError when they have no round in common.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(baseline, variant, strict=False) if ours and theirs]
    if not pairs:
        raise ValueError("no round in common")
    by_round = [median(first) / median(second) for first, second in pairs]
    of_medians = median(pooled([first for first, _ in pairs])) / median(pooled([second for _, second in pairs]))
    return Ratio(of_medians, min(by_round), max(by_round), len(pairs))
