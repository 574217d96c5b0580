"""The validation losses of a run: their error, what changed, and when over-fitting began. Imports neither torch nor sd-scripts.

An evaluation has a loss for each validation batch, with the same images, timesteps and noise in every evaluation. So the
difference of two evaluations has a much smaller standard error than either: that of the differences of the single batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

KIND = "validation"
"""The kind of an evaluation's line in the journal."""

_BANDS = (250, 500, 750, 1000)
"""Upper limits of the bands of timesteps."""

_RISE = 0.01
"""Smallest rise of the validation loss, relative, that counts as over-fitting."""

_SURE, _JUMPS = 2, 4
"""Standard errors, and standard deviations of the jumps between evaluations, of a rise that counts as over-fitting.

The second is large because the lowest of many means is compared: at most 7% of plateaus of 18 to 90 evaluations are marked.
"""

_NORMAL_MEDIAN = statistics.NormalDist().inv_cdf(0.75)
"""Median of the absolute values of a normal distribution."""

_WINDOW, _SHARE = 3, 8
"""Number of evaluations that are averaged to find where validation turned, and at least this part of all."""


@dataclass(frozen=True)
class Sample:
    """The loss of a validation batch at a timestep."""

    batch: int
    timestep: float | None
    """From 0 to 1000; None if the script does not show it."""
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """The validation losses after a step."""

    step: int
    epoch: int
    """From 1."""
    losses: tuple[float, ...]
    """The mean loss of each batch over its timesteps."""
    bands: Mapping[str, float]
    """Range of timesteps -> mean loss; empty if they are not known."""
    held_out: bool
    """Whether the images are not trained on."""

    @property
    def loss(self) -> float:
        """The mean of all batches."""
        return statistics.fmean(self.losses)

    @property
    def error(self) -> float | None:
        """The standard error of the loss; None for a single batch."""
        return _standard_error(self.losses)

    def change_from(self, other: Evaluation) -> tuple[float, float]:
        """Return the difference from another evaluation and its standard error, which is 0 for a single batch.

        Evaluations of different batches are compared by their means.
        """
        if len(self.losses) != len(other.losses):
            return self.loss - other.loss, math.hypot(self.error or 0.0, other.error or 0.0)
        differences = [ours - theirs for ours, theirs in zip(self.losses, other.losses, strict=True)]
        return statistics.fmean(differences), _standard_error(differences) or 0.0

    def text(self, before: Evaluation | None) -> str:
        """Return a sentence on the loss, its standard error, and the change since an earlier evaluation."""
        error = "" if self.error is None else f", standard error {self.error:.2g}"
        parts = [f"validation loss {self.loss:.4g}{error} ({len(self.losses)} batches)"]
        if before is not None and before.loss > 0 and self.error is not None:
            change, noise = (value / before.loss for value in self.change_from(before))
            needed = max(math.ceil(len(self.losses) * (_SURE * noise / 0.01) ** 2), 2)
            parts.append(f"{change:+.1%} since step {before.step}, standard error {noise:.2%}")
            parts.append(f"to see a change of 1% takes {needed:,} batches")
        return "; ".join(parts)

    def line(self) -> dict[str, Any]:
        """Return the values of the journal's line."""
        facts = asdict(self)
        return {"loss": self.loss, "error": self.error, **facts, "losses": list(self.losses), "bands": dict(self.bands)}


def evaluation(step: int, epoch: int, samples: Sequence[Sample], held_out: bool) -> Evaluation | None:
    """Return the evaluation of samples; None without any, or if a loss is not finite."""
    if not samples or not all(math.isfinite(sample.loss) for sample in samples):
        return None
    batches = sorted({sample.batch for sample in samples})
    means = (statistics.fmean(sample.loss for sample in samples if sample.batch == batch) for batch in batches)
    bands: dict[str, list[float]] = {}
    for sample in sorted((each for each in samples if each.timestep is not None), key=lambda each: each.timestep or 0.0):
        bands.setdefault(_band(sample.timestep or 0.0), []).append(sample.loss)
    return Evaluation(step, epoch, tuple(means), {name: statistics.fmean(losses) for name, losses in bands.items()}, held_out)


def of_lines(lines: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Return the evaluations of a journal's lines in order. Of a step that a resume has repeated, the last one counts."""
    by_step: dict[int, Evaluation] = {}
    for line in lines:
        losses, step = line.get("losses"), line.get("step")
        if (
            line.get("kind", KIND) == KIND
            and losses
            and all(type(loss) in (int, float) for loss in losses)
            and step is not None
        ):
            bands = line.get("bands") or {}
            by_step[step] = Evaluation(step, line.get("epoch") or 0, tuple(losses), bands, bool(line.get("held_out")))
    return [by_step[step] for step in sorted(by_step)]


def best(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the last evaluation that was better than the best one before by more than the standard error; None without any."""
    chosen: Evaluation | None = None
    for each in evaluations:
        if chosen is None or is_better(each, chosen):
            chosen = each
    return chosen


def is_better(each: Evaluation, other: Evaluation) -> bool:
    """Return whether a loss is lower than another one by more than the standard error of the difference."""
    change, error = each.change_from(other)
    return change < -error


def without_improvement(evaluations: Sequence[Evaluation]) -> int:
    """Return the number of evaluations after the best one."""
    chosen = best(evaluations)
    return 0 if chosen is None else sum(each.step > chosen.step for each in evaluations)


def overfitting(evaluations: Sequence[Evaluation], steps: Sequence[int], losses: Sequence[float]) -> Evaluation | None:
    """Return the evaluation at which over-fitting began: where validation was lowest, if it rises since while training falls.

    ``steps`` and ``losses`` are those of training. Evaluations also differ because the weights move to and fro, so means of
    several are compared, and a rise must be larger than their error. None without held-out images.
    """
    window = max(_WINDOW, len(evaluations) // _SHARE)
    means = [
        statistics.fmean(each.loss for each in evaluations[at : at + window]) for at in range(len(evaluations) - window + 1)
    ]
    turn = min(range(len(means)), key=means.__getitem__, default=0)
    if len(means) - turn < window or not evaluations[0].held_out:
        return None
    rise, needed = means[-1] - means[turn], _JUMPS * _deviation(evaluations) * math.sqrt(2 / window)
    lowest = min(evaluations[max(turn - 1, 0) : turn + window], key=lambda each: each.loss)
    _, error = evaluations[-1].change_from(lowest)
    certain = rise > max(needed, _SURE * error, _RISE * means[turn])
    return lowest if certain and _falls(steps, losses, lowest.step) else None


def _deviation(evaluations: Sequence[Evaluation]) -> float:
    """Return the standard deviation of single losses around a curve, from the median of their second differences.

    The few that are at the start and at the turn of the curve do not count.
    """
    losses = [each.loss for each in evaluations]
    bends = [abs(before - 2 * loss + after) for before, loss, after in zip(losses, losses[1:], losses[2:], strict=False)]
    return statistics.median(bends) / (_NORMAL_MEDIAN * math.sqrt(6))


def _falls(steps: Sequence[int], losses: Sequence[float], since: int) -> bool:
    """Return whether the mean of the losses is lower after a step than before, over as many steps."""
    known = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
    before, after = [loss for step, loss in known if step <= since], [loss for step, loss in known if step > since]
    count = min(len(before), len(after))
    return bool(count) and statistics.fmean(after[-count:]) < statistics.fmean(before[-count:])


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _band(timestep: float) -> str:
    upper = next((limit for limit in _BANDS if timestep < limit), _BANDS[-1])
    return f"{upper - _BANDS[0]}-{upper}"
