"""The fastest configuration that fits a GPU: a shipped tier if its memory is known, otherwise a search over memory savings.

Nothing here imports torch; a new estimate does (kohya_ext.estimate.measurement).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kohya_ext.config import preset_files
from kohya_ext.config.arguments import RunArguments, read_arguments
from kohya_ext.config.command_line import rewritten, values_of
from kohya_ext.config.settings import AUTO
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config, predict
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.planning.memory_savings import MEMORY_SAVINGS, Attempt, Changes, MemorySaving, Step, after, steps
from kohya_ext.planning.tiers import Tier, fits, tiers
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import gigabytes, label

#: Maximum number of new estimates for one plan, about 20 seconds each.
MAX_ESTIMATES = 12


@dataclass(frozen=True)
class Candidate:
    """A configuration of a script and its estimate."""

    name: str
    """The preset, or the flags of the last change."""
    argv: tuple[str, ...]
    """The script's arguments."""
    estimate: Estimate
    traded: str = ""
    """The drawbacks of its preset and changes."""


@dataclass(frozen=True)
class Branch:
    """One step of the decision tree."""

    saving: MemorySaving
    status: Literal["taken", "in part", "not needed", "fixed"]
    """``fixed``: the user's own options rule it out."""
    words: tuple[str, ...]
    """The flags that it sets in the answer, or would set."""
    figures: str = ""
    """Its measurable cost in the answer."""

    @property
    def costs(self) -> str:
        """The cost of the change."""
        same = "; the result is bit-identical" if self.saving.exact else ""
        return f"{self.saving.costs}{same}{self.figures and f'. Here: {self.figures}'}"


@dataclass(frozen=True)
class Plan:
    """The fastest configuration, its alternatives and the decisions behind it."""

    card: int
    answer: Candidate
    others: tuple[Candidate, ...]
    """The next best that fit, the fastest first."""
    too_big: tuple[Candidate, ...]
    """Configurations that do not fit, the smallest first."""
    tree: tuple[Branch, ...]


def plan(
    checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str], card: int, announce: Callable[[str], None]
) -> Plan:
    """Return the fastest configuration of a script (its file name) that fits ``card`` bytes less a margin.

    The options in ``argv`` are kept, and so is the product of batch size and accumulation. If the memory of the shipped tiers
    with these arguments is not known, makes up to :data:`MAX_ESTIMATES` estimates and reports them through ``announce``.
    Raises UserError when nothing fits, or for arguments that cannot be estimated.
    """
    known = _known_tiers(checkout, script, argv, environ)
    search = _Search(checkout, script, list(argv), environ, card, announce)
    answered = any(fits(candidate.estimate, card) for candidate in known)
    candidates = known if answered else [*search.candidates(), *known]
    inside = [candidate for candidate in candidates if fits(candidate.estimate, card)]
    outside = [candidate for candidate in candidates if candidate not in inside]
    outside.sort(key=lambda candidate: candidate.estimate.reserved)
    if not inside and search.stopped:
        raise UserError(f"nothing fits in the first {MAX_ESTIMATES} estimates; rerun to continue (results are cached)")
    if not inside:
        raise UserError(
            f"nothing fits the {label(card)} less 5 percent; the smallest configuration, {outside[0].name}, needs "
            f"{gigabytes(outside[0].estimate.total)} GB"
        )
    if not answered:
        inside.sort(key=_slowness)
    tree = _tree(checkout, script, argv, environ, inside[0])
    copied = _copy_cost(inside[0].estimate, [candidate.estimate for candidate in candidates])
    return Plan(
        card, inside[0], tuple(inside[1:3]), tuple(outside),
        tuple(replace(branch, figures=copied) if "--blocks_to_swap" in branch.words else branch for branch in tree),
    )  # fmt: skip


def automatic(script: str, argv: Sequence[str], environ: Mapping[str, str], card: int) -> str:
    """Return the name of the tier for ``--preset auto``, in well under a second and without a new estimate.

    This is the largest tier that fits with the user's arguments or, where its memory is not known, the tier of the GPU's size.
    Raises UserError when there is none.
    """
    smaller = ""
    tier = None
    for tier, run in _tiers_with(script, argv, environ):
        row = cache.shipped(memory_config.normalized(memory_config.read(script, run, argv)[0]))
        if row is not None and fits(Estimate(**row), card):
            return tier.name
        if row is None and tier.card <= card and not smaller:
            smaller = tier.name
    if tier is None:
        raise UserError(f"--preset auto: {script} has no presets for GPU sizes; run `python -m kohya_ext plan {script}`")
    if not smaller:
        raise UserError(f"--preset auto: no preset of {script} fits the {label(card)}; run `python -m kohya_ext plan {script}`")
    return smaller


def _slowness(candidate: Candidate) -> tuple[float, ...]:
    """Return the sort key of candidates, the fastest first: swapped blocks, operations per image, then reserved memory."""
    estimate = candidate.estimate
    return int(estimate.config.get("blocks_to_swap") or 0), estimate.flops_per_image, -estimate.reserved


# --- the shipped tiers -----------------------------------------------------------------------------------------------


def _tiers_with(script: str, argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[Tier, RunArguments]]:
    """Yield the tiers of a script's kind of model, the largest first, with the arguments for each."""
    kind = memory_config.read(script, _read(script, argv, environ, ()), argv)[0].kind
    for tier in sorted(tiers(kind), key=lambda tier: -tier.card):
        yield tier, _read(script, argv, environ, (tier.name,))


def _read(script: str, argv: Sequence[str], environ: Mapping[str, str], auto: Sequence[str] | None = None) -> RunArguments:
    """Read a command line with compiling off: compiled blocks need less memory, but three times as long to estimate."""
    run = read_arguments(script, argv, environ, auto)
    return replace(run, settings=run.settings.with_(selective_torch_compile=False, activation_memory_budget=None))


def _known_tiers(checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[Candidate]:
    """Return the distinct tiers with the user's arguments; none unless the memory of all tiers is known."""
    rows: dict[MemoryConfig, tuple[Tier, dict[str, Any]]] = {}
    for tier, run in _tiers_with(script, argv, environ):
        config = memory_config.normalized(memory_config.read(script, run, argv)[0])
        row = cache.find(checkout, config, run.settings.disable_patch)
        if row is None:
            return []
        rows.setdefault(config, (tier, row))
    return [_candidate(tier, row, script, argv) for tier, row in rows.values()]


def _candidate(tier: Tier, row: Mapping[str, Any], script: str, argv: Sequence[str]) -> Candidate:
    name = tier.name.rpartition("/")[2] if preset_files.FAMILIES.get(script) == tier.family else tier.name
    words = ("--preset", name, *_without_auto(argv))
    return Candidate(f"preset {tier.name}", words, Estimate(**row), str(tier.about["traded"]))


def _without_auto(argv: Sequence[str]) -> list[str]:
    kept = [word for index, word in enumerate(argv) if not (word == AUTO and argv[index - 1] == "--preset")]
    return [
        word
        for index, word in enumerate(kept)
        if word != f"--preset={AUTO}" and not (word == "--preset" and (index + 1 == len(kept) or kept[index + 1][:2] == "--"))
    ]


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    """A search over memory savings from the family's base preset with the user's arguments, with an estimate for each."""

    checkout: Checkout
    script: str
    argv: list[str]
    environ: Mapping[str, str]
    card: int
    announce: Callable[[str], None]
    measured: int = 0
    tried: list[Candidate] = field(default_factory=list)
    stopped: bool = False
    """Whether :data:`MAX_ESTIMATES` was reached."""

    def candidates(self) -> list[Candidate]:
        """Return all configurations tried: adds savings until one fits, then reduces the last one while it still fits."""
        run = _read(self.script, self.argv, self.environ, ())
        kind = memory_config.read(self.script, run, self.argv)[0].kind
        base = preset_files.base(kind)
        own = _without_auto(self.argv)
        theirs = {**(run.config.values if run.config is not None else {}), **values_of(own)}
        start = _without_accumulation(["--preset", base.name, *own] if base is not None else own, theirs)
        fixed = theirs.keys() - {"train_batch_size", "gradient_accumulation_steps"}
        recipe = str(base.about.get("traded", "")) if base is not None else ""
        points = [_Point("the base preset", {}, recipe)]
        state = attempt(self.checkout, self.script, start, self.environ)
        while (step := _next(state, fixed)) is not None:
            points.append(points[-1].after(step))
            state = after(state, step)
        if self.card < min((tier.card for tier in tiers(kind)), default=0) and not self._try(start, points[-1]):
            return self.tried  # not even the smallest fits
        for index, point in enumerate(points):
            if self._try(start, point):
                if index:
                    self._shrink_last_change(start, points[index - 1].changes, point, fixed)
                break
        return self.tried

    def _try(self, start: Sequence[str], point: _Point) -> bool:
        """Estimate a configuration; return whether it fits. Beyond the limit, return True without an estimate."""
        argv = rewritten(start, point.changes)
        run = _read(self.script, argv, self.environ)
        config = memory_config.normalized(memory_config.read(self.script, run, argv)[0])
        if cache.find(self.checkout, config, run.settings.disable_patch) is None:
            if self.measured == MAX_ESTIMATES:
                self.stopped = True
                return True
            if self.measured == 0:
                self.announce(f"no known estimate for these arguments; making up to {MAX_ESTIMATES}, about 20 seconds each")
            self.measured += 1
            self.announce(f"estimate {self.measured} of at most {MAX_ESTIMATES}: {point.name}")
        candidate = Candidate(point.name, tuple(argv), predict.estimate(self.checkout, self.script, run, argv), point.traded)
        if candidate not in self.tried:
            self.tried.append(candidate)
        return fits(candidate.estimate, self.card)

    def _shrink_last_change(self, start: Sequence[str], before: Changes, point: _Point, fixed: Set[str]) -> None:
        """Reduce the last change to the smallest that fits: fewer swapped blocks, or else fewer checkpointed ones."""
        parts: list[float]
        if (limit := point.changes.get("blocks_to_swap")) is not None:
            key, parts = "blocks_to_swap", [*range(int(str(before.get("blocks_to_swap", 0))) + 1, int(str(limit)))]
        elif "gradient_checkpointing" in point.changes:
            key, parts = "gradient_checkpointing_ratio", [part / 8 for part in range(1, 8)]
        else:
            return
        if key in fixed - point.changes.keys():
            return
        low, high = 0, len(parts)
        while low < high:
            middle = (low + high) // 2
            part = replace(point, name=_named(key, parts[middle]), changes={**point.changes, key: parts[middle]})
            if self._try(start, part):
                high = middle
            else:
                low = middle + 1


@dataclass(frozen=True)
class _Point:
    """The changes up to one memory saving."""

    name: str
    """The last change, as flags."""
    changes: Changes
    recipe: str
    """The drawbacks of the family's base preset."""
    taken: tuple[str, ...] = ()
    """The names of the savings so far."""

    def after(self, step: Step) -> _Point:
        """Return the point with one more step."""
        taken = self.taken if step.saving.name in self.taken else (*self.taken, step.saving.name)
        return _Point(" ".join(step.words), {**self.changes, **step.changes}, self.recipe, taken)

    @property
    def traded(self) -> str:
        """The drawbacks of the base preset, and the names of the savings, whose costs are in the decision tree."""
        return "; ".join(filter(None, [self.recipe, ", ".join(self.taken)]))


def _named(key: str, value: object) -> str:
    return " ".join(_words({key: value}))


def _next(run: Attempt, fixed: Set[str]) -> Step | None:
    return next((step for step in steps(run) if not fixed & step.changes.keys()), None)


def _without_accumulation(argv: list[str], given: Mapping[str, Any]) -> list[str]:
    """Return arguments with accumulation moved into the batch, which the search splits as far as needed."""
    images = int(given.get("train_batch_size", 1)) * int(given.get("gradient_accumulation_steps", 1))
    if images == 1:
        return argv
    return rewritten(argv, {"train_batch_size": images, "gradient_accumulation_steps": 1})


# --- the tree --------------------------------------------------------------------------------------------------------


def _tree(
    checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str], answer: Candidate
) -> Iterator[Branch]:
    """Yield the savings that apply to upstream's defaults, with the status of each in the answer."""
    own = _without_auto(argv)
    run = start = _at_full_size(checkout, script, own, environ)
    chosen = attempt(checkout, script, answer.argv, environ)
    offered: dict[str, dict[str, object]] = {}
    while (step := next(steps(run), None)) is not None:
        run = after(run, step)
        offered[step.saving.name] = {**offered.get(step.saving.name, {}), **step.changes}
    for saving in MEMORY_SAVINGS:
        if (offer := offered.get(saving.name)) is None:
            continue
        left = saving.changes(chosen)
        used = {key: chosen.values[key] for key, value in offer.items() if chosen.values.get(key) == value}
        some = {key: chosen.values[key] for key in left if _is_part(start.values.get(key), chosen.values.get(key))}
        if not left and used:
            yield Branch(saving, "taken", _words(used))
        elif used or some:
            yield Branch(saving, "in part", _words({**used, **some}))
        elif values_of(own).keys() & offer.keys():
            yield Branch(saving, "fixed", ())
        elif left:
            yield Branch(saving, "not needed", _words(left))


def _at_full_size(checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str]) -> Attempt:
    """Return upstream's defaults with the user's arguments, at the resolution of the family's base preset."""
    run = attempt(checkout, script, argv, environ)
    base = preset_files.base(memory_config.read(script, _read(script, argv, environ, ()), argv)[0].kind)
    if base is None or "resolution" in run.values:
        return run
    recipe = attempt(checkout, script, ["--preset", base.name, *argv], environ)
    return replace(run, values={**run.values, "resolution": recipe.values.get("resolution")})


def _is_part(before: object, now: object) -> bool:
    """Return whether a value is a number or fraction of blocks, or a changed text such as a resolution."""
    if isinstance(now, str):
        return before is not None and now != before
    return isinstance(now, (int, float)) and not isinstance(now, bool) and now > 0


#: Bytes per second of PCIe 4.0 x16 in one direction.
_BUS = 25e9


def _copy_cost(answer: Estimate, estimates: Sequence[Estimate]) -> str:
    """Return the amount that block swap copies, as text; empty without it, or without an estimate of the model with no swap.

    One block leaves and another replaces it, in forward and again in backward (custom_offloading_utils.py).
    """
    precision = ("fp8_base", "fp8_scaled", "full_bf16", "mixed_precision")
    unswapped = [
        estimate.parts["weights"]
        for estimate in estimates
        if not estimate.config.get("blocks_to_swap")
        and "weights" in estimate.parts
        and all(estimate.config.get(name) == answer.config.get(name) for name in precision)
    ]
    if not unswapped or not answer.config.get("blocks_to_swap") or "weights" not in answer.parts:
        return ""
    size = max(unswapped) - answer.parts["weights"]
    return (
        f"{gigabytes(size)} GB of weights are in host memory; every batch copies {gigabytes(4 * size)} GB over the bus, "
        f"{4 * size / _BUS:.1f} s at 25 GB/s minus the overlap with computation"
    )


def _words(changes: Changes) -> tuple[str, ...]:
    return tuple(rewritten([], changes))


def attempt(checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str]) -> Attempt:
    """Return a command line for :func:`memory_savings.steps`, without the script's own parser, which takes seconds."""
    run = read_arguments(script, argv, environ)
    layers = (
        {key: value.value for key, value in run.presets.values.items()},
        dict(run.config.values) if run.config is not None else {},
        values_of(argv),
    )
    files = [checkout.script(script), checkout.path / "train_network.py", *(checkout.path / "library").glob("*.py")]
    text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    return Attempt(script, {key: value for layer in layers for key, value in layer.items()}, lambda key: f'"--{key}"' in text)
