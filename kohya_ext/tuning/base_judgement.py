"""Whether an 8-bit base is good enough for a user's own checkpoint and data: its losses compared with those in 16 bits.

The rule: an 8-bit base is good enough if it changes the loss of a batch by at most :data:`LOSS` (the root mean square over the
batches), or by at most :data:`NOISE` times as much as another order of sums does in 16 bits, and no block's output by more
than :data:`BLOCK` of its norm. Losses of a good base change by up to half a percent (benchmarks/README.md, quality of an 8-bit
base), and int8 changes a block's output by 2 to 3 percent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LOSS, NOISE, BLOCK = 0.01, 2.0, 0.05

#: How many of the worst layers are named.
_WORST = 3


@dataclass(frozen=True)
class Judgement:
    """How an 8-bit base changes the first batches of a run."""

    precision: str
    """Its 8-bit format, with the option for convolutions (:func:`kohya_ext.estimate.tuned.base_of`)."""
    loss: float
    """Root mean square of the relative changes of the losses."""
    noise: float
    """The same for 16 bits with another order of sums."""
    blocks: Mapping[str, float]
    """Block -> relative difference of its output, which includes those of the blocks before it."""
    layers: Mapping[str, float]
    """Linear layer -> relative error of its output for its own input."""
    batches: int

    @property
    def block(self) -> float:
        """The largest difference of a block's output."""
        return max(self.blocks.values(), default=0.0)

    @property
    def is_good(self) -> bool:
        """Whether it may be used, by the rule of this module."""
        return self.loss <= max(LOSS, NOISE * self.noise) and self.block <= BLOCK

    def lines(self) -> list[str]:
        """Return a sentence with the judgement, and one with its reasons."""
        advice = "use it" if self.is_good else "do not use it"
        rule = f"the rule: at most {LOSS:.0%} or {NOISE:g} times the noise, and at most {BLOCK:.0%} of a block's output"
        worst = sorted(self.layers.items(), key=lambda item: -item[1])[:_WORST]
        return [
            f"--base_precision {self.precision}: {advice}. It changes the loss of {self.batches} batches by {self.loss:.2%} "
            f"(rounding in 16 bits: {self.noise:.2%}), and a block's output by up to {self.block:.1%} ({rule}).",
            "Layers with the largest errors: " + ", ".join(f"{name} {error:.1%}" for name, error in worst) + ".",
        ]


class NotComparableError(Exception):
    """The reason why losses cannot be judged."""


def judge(precision: str, reference: Mapping[str, Any], result: Mapping[str, Any]) -> Judgement:
    """Return the judgement on the losses of a process in 8 bits, by those of one in 16 bits. Raises NotComparableError."""
    for each in (reference, result):
        if "failed" in each:
            raise NotComparableError(str(each["failed"]))
    # In 16 bits each batch is computed twice.
    if reference["batches"] != result["batches"] or len(reference["losses"]) != len(result["losses"]):
        raise NotComparableError("the script did not draw the same batches twice")
    if not all(loss > 0 for loss in reference["losses"]):
        raise NotComparableError("a loss is zero or not finite")
    return Judgement(
        precision,
        _change(reference["losses"], result["losses"]),
        _change(reference["losses"], reference["reversed"]),
        result["blocks"],
        reference["layers"].get(precision.split()[0], {}),
        len(result["losses"]),
    )


def _change(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the root mean square of the relative changes."""
    squares = [((other - loss) / loss) ** 2 for loss, other in zip(losses, others, strict=True)]
    return float((sum(squares) / len(squares)) ** 0.5)
