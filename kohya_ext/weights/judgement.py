"""Judge a network or a fine-tuned checkpoint against the base model: whether it changes it, how far, and whether it is broken.

How far is the Frobenius norm of the change, divided by that of the base weight. A module, or a piece of a tensor, is in memory
at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kohya_ext.errors import UserError
from kohya_ext.preflight import abbreviated
from kohya_ext.run.evaluations import Evaluation
from kohya_ext.run.scaled_checkpoints import UnreadableError, stored_weights
from kohya_ext.weights import comparison, deltas, names
from kohya_ext.weights.base_weights import base_weights, key
from kohya_ext.weights.names import AdaptedModule, Place
from kohya_ext.weights.report import Report
from kohya_ext.weights.tensor_file import TensorFile

_NO_EFFECT = 1e-5
"""Largest relative change of a component that has no effect: a hundredth of the rounding of 16-bit weights."""

_OUTLIER, _LARGE = 10, 0.1
"""A module is an outlier if its relative change is larger than the second, and this many times the median of its component."""

_EXAMPLES = 3
"""Number of modules to name in a message."""

_RISE = 0.01
"""Rise of the validation loss since the lowest, relative, from which a file is over-trained."""

_UNKNOWN = ("OFT", "OFTv2", "BOFT", "LLLite", "norm")
"""Kinds of modules whose change depends on more than the weight, so it is not compared."""


class Change(NamedTuple):
    """The change of a module or tensor."""

    name: str
    place: Place
    base: float
    """The squared norm of the base weight."""
    change: float
    """The squared norm of its change."""

    @property
    def relative(self) -> float:
        """The norm of the change, relative to that of the base weight."""
        return math.sqrt(self.change / self.base) if self.base else math.inf if self.change else 0.0


@dataclass(frozen=True)
class Block:
    """How far the weights of a block moved."""

    component: str
    family: str
    """The repeated blocks; empty for all others."""
    index: int | None
    count: int
    """The number of modules or tensors."""
    relative: float

    @property
    def label(self) -> str:
        """The name of the block in its component."""
        return f"{self.family} {self.index}" if self.index is not None else "other modules"


@dataclass
class Training:
    """What the journal of the run says about the file."""

    step: int
    evaluation: Evaluation
    """The validation at the file's step, or the last one before it."""
    first: Evaluation
    lowest: Evaluation
    began: Evaluation | None
    """The validation at which over-fitting began; None if it did not."""
    best_file: str
    """The saved file with the lowest validation loss; empty if it is not known."""

    @property
    def rise(self) -> float:
        """How much higher the file's validation loss is than the lowest, relative."""
        return self.evaluation.loss / self.lowest.loss - 1

    @property
    def is_over(self) -> bool:
        """Whether the file was trained beyond the step at which over-fitting began."""
        return self.began is not None and self.evaluation.step > self.began.step and self.rise > _RISE


@dataclass
class Judgement:
    """The judgement of a file."""

    base: str
    """The name of the base model's file."""
    blocks: list[Block] = field(default_factory=list)
    components: dict[str, float] = field(default_factory=dict)
    """Component -> relative change of the weights that the file changes."""
    outliers: list[str] = field(default_factory=list)
    """Modules that moved much farther than the others, and their relative change."""
    unmatched: list[str] = field(default_factory=list)
    """Modules without a weight in the base, or that are not compared."""
    problems: list[str] = field(default_factory=list)
    """Why the file is unusable, in addition to those of the report."""
    training: Training | None = None

    @property
    def largest(self) -> Block | None:
        """The block that moved farthest."""
        return max(self.blocks, key=lambda block: block.relative, default=None)

    def text(self, report: Report) -> str:
        """Return the judgement in one paragraph."""
        return " ".join(filter(None, [self._effect(report), self._health(report), self._training()]))

    def _effect(self, report: Report) -> str:
        name, largest = report.file.name, self.largest
        if problems := [*report.problems, *self.problems]:
            return f"{name} is unusable: {problems[0]}."
        if largest is None:
            return f"{name}: its change of {self.base} is not known, because none of its modules can be compared."
        parts = ", ".join(f"the {component} by {relative:.2%}" for component, relative in self.components.items())
        where = f", most in {largest.label} ({largest.relative:.2%})" if len(self.blocks) > 1 else ""
        return f"{name} changes the weights of {parts}{where}."

    def _health(self, report: Report) -> str:
        still = report.unmoved()
        parts = ["" if report.not_finite else "All values are finite"]
        if self.outliers:
            parts.append(f"{len(self.outliers):,} modules moved much farther than the others: {self._some(self.outliers)}")
        elif self.blocks:
            parts.append("no module is an outlier")
        if still:
            parts.append(f"{len(still):,} of {len(report.modules):,} modules never moved")
        if self.unmatched:
            parts.append(f"{len(self.unmatched):,} are not compared ({self._some(self.unmatched)})")
        text = "; ".join(filter(None, parts))
        return f"{text[:1].upper()}{text[1:]}."

    @staticmethod
    def _some(listed: list[str]) -> str:
        return abbreviated(listed, _EXAMPLES)

    def _training(self) -> str:
        known = self.training
        if known is None:
            return "Whether it is over-trained is not known, because its run was not validated (--validation_split)."
        loss = f"The validation loss at step {known.evaluation.step} is {known.evaluation.loss:.4g}"
        since = known.evaluation.loss / known.first.loss - 1
        loss += f", {since:+.1%} since step {known.first.step}" if known.first.step < known.evaluation.step else ""
        if not known.lowest.held_out:
            return f"{loss}, of training images, so it measures memorisation only partly."
        if known.is_over:
            use = f"; use {known.best_file}" if known.best_file else ""
            return f"{loss}, {known.rise:.1%} above the lowest at step {known.lowest.step}: it is over-trained{use}."
        return f"{loss}: it is not over-trained."


def judge(file: TensorFile, base: TensorFile, report: Report, training: Training | None = None) -> Judgement:
    """Compare a file with its base. Raises UserError for a base that cannot be read as it is, ValueError and OSError."""
    _check_base(base)
    modules, _ = names.adapted_modules(file.specs)
    result = Judgement(base.path.name, training=training)
    changes = list(_of_modules(file, base, modules, result) if modules else _of_tensors(file, base, result))
    changes = [each for each in changes if math.isfinite(each.base) and math.isfinite(each.change)]
    result.blocks = _blocks(changes)
    result.components = {component: _relative(members) for component, members in _grouped(changes).items()}
    result.outliers = list(_outliers(changes))
    if not report.problems and changes and max(result.components.values()) < _NO_EFFECT:
        result.problems.append(f"it does not change {base.path.name} by more than rounding")
    return result


def _check_base(base: TensorFile) -> None:
    if names.adapted_modules(base.specs)[0]:
        raise UserError(f"--against {base.path}: is a network; give the base model")
    try:
        stored = stored_weights(base.path)
    except (UnreadableError, ValueError):
        stored = None
    if stored is not None:
        raise UserError(f"--against {base.path}: {stored}; give the base model in 16 or 32 bits")


def _of_modules(file: TensorFile, base: TensorFile, modules: dict[str, AdaptedModule], result: Judgement) -> Iterator[Change]:
    weights, misfits, absent = base_weights(base.specs), [], 0
    for name, place in sorted(names.places(modules).items(), key=lambda item: item[1].order):
        weight, module = weights.get(key(place)), modules[name]
        absent += weight is None
        if weight is None or module.kind in _UNKNOWN or deltas.missing_part(module):
            result.unmatched.append(name)
            continue
        values = weight.read(base)
        change = _change(file, module, values)
        if change is None:
            misfits.append(name)
            continue
        yield Change(name, place, float(torch.linalg.vector_norm(values)) ** 2, change)
    if misfits:
        result.problems.append(
            f"{len(misfits):,} of {len(modules):,} modules do not fit {base.path.name} "
            f"({abbreviated(misfits, _EXAMPLES)}); it was trained for another model"
        )
    elif absent == len(modules) and not any(module.kind in _UNKNOWN for module in modules.values()):
        result.problems.append(f"{base.path.name} has none of its modules; it was trained for another model")


def _change(file: TensorFile, module: AdaptedModule, weight: torch.Tensor) -> float | None:
    """Return the squared norm of a module's change of a weight; None if their shapes differ."""
    try:
        delta = deltas.delta(file, module)
    except ValueError:
        return None
    product = delta.products.get("weight") or delta.products.get("diff")
    if product is None or product.shape != tuple(weight.shape):
        return None
    if module.kind != "DoRA":
        return product.norm() ** 2
    magnitude = file.tensor(module.tensors["magnitude"]).to(torch.float32).flatten()
    changed = weight + product.dense()
    by_output = magnitude.numel() == weight.shape[0]
    if not by_output and weight.shape[1] % magnitude.numel():
        return None
    # One magnitude for each output, or for each input with its kernel: https://github.com/KohakuBlueleaf/LyCORIS
    groups = changed.unsqueeze(1) if by_output else changed.reshape(len(changed), magnitude.numel(), -1)
    norm = torch.linalg.vector_norm(groups, dim=(1, 2) if by_output else (0, 2), keepdim=True)
    scaled = groups * (magnitude.reshape(norm.shape) / norm.clamp_min(torch.finfo(torch.float32).tiny))
    return float(torch.linalg.vector_norm(scaled.reshape(weight.shape) - weight)) ** 2


def _of_tensors(file: TensorFile, base: TensorFile, result: Judgement) -> Iterator[Change]:
    ours, theirs = comparison.by_path(file.specs), comparison.by_path(base.specs)
    places = names.places(file.specs)
    for path, name in ours.items():
        other = theirs.get(path)
        if other is None or file.specs[name].shape != base.specs[other].shape:
            result.unmatched.append(name)
            continue
        squares = change = 0.0
        for before, after in comparison.chunk_pairs(base, file, other, name):
            squares += float(torch.linalg.vector_norm(before)) ** 2
            change += float(torch.linalg.vector_norm(after - before)) ** 2
        yield Change(name, places[name], squares, change)
    if len(result.unmatched) == len(ours):
        result.problems.append(f"{base.path.name} has none of its tensors; it was trained from another model")


def _grouped(changes: Sequence[Change]) -> dict[str, list[Change]]:
    groups: dict[str, list[Change]] = {}
    for each in changes:
        groups.setdefault(each.place.component, []).append(each)
    return groups


def _relative(changes: Sequence[Change]) -> float:
    return Change("", changes[0].place, sum(each.base for each in changes), sum(each.change for each in changes)).relative


def _blocks(changes: Sequence[Change]) -> list[Block]:
    members: dict[tuple[str, str, int | None], list[Change]] = {}
    for each in changes:
        members.setdefault((each.place.component, each.place.family, each.place.index), []).append(each)
    return [Block(*place, len(group), _relative(group)) for place, group in members.items()]


def _outliers(changes: Sequence[Change]) -> Iterator[str]:
    """Yield the modules that moved much farther than those of their component. Biases and norms of a checkpoint are small."""
    for group in _grouped(changes).values():
        median = statistics.median(each.relative for each in group)
        for each in group:
            if each.relative > max(_OUTLIER * median, _LARGE) and len(group) > _OUTLIER and math.isfinite(each.relative):
                yield f"{each.name} {each.relative:.0%}"
