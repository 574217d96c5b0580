"""The fastest configuration that fits a card: a shipped tier where one answers, else a walk down the ladder.

Nothing here imports torch; an estimate that has to be made does (vram/making.py).
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
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate, estimate
from kohya_ext.planning.memory_savings import LADDER, Attempt, Changes, MemorySaving, Step, after, steps
from kohya_ext.planning.tiers import Tier, fits, tiers
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import gigabytes, label

#: Estimates that one plan makes at most, about 20 seconds each.
MOST = 12


@dataclass(frozen=True)
class Candidate:
    """One way to run a script."""

    name: str
    """A tier, or what the walk changed, in words."""
    argv: tuple[str, ...]
    """The script's arguments with it."""
    found: Estimate
    traded: str = ""


@dataclass(frozen=True)
class Branch:
    """One step of the decision tree."""

    rung: MemorySaving
    status: Literal["taken", "in part", "not needed", "yours", "not estimated"]
    """``yours``: what the user has said stands in its way."""
    words: tuple[str, ...]
    """What it sets in the answer, or would set."""
    figures: str = ""
    """What it costs in the answer, as far as that can be counted."""

    @property
    def costs(self) -> str:
        """What it costs, in words."""
        same = "; the result stays the same, bit for bit" if self.rung.exact else ""
        return f"{self.rung.costs}{same}{self.figures and f'. Here: {self.figures}'}"


@dataclass(frozen=True)
class Plan:
    """The answer, and how it was found."""

    card: int
    answer: Candidate
    others: tuple[Candidate, ...]
    """The next best that fit, the better one first."""
    too_big: tuple[Candidate, ...]
    """What was tried and needs more than the card has, the smallest first."""
    tree: tuple[Branch, ...]


def plan(
    checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str], card: int, announce: Callable[[str], None]
) -> Plan:
    """Return the fastest configuration of a script (its file name) that fits ``card`` bytes less a margin.

    What ``argv`` says stands; batch size and accumulation may change places, their product stays. Answered from what is known
    if the shipped tiers with these arguments are; otherwise up to :data:`MOST` estimates are made, and ``announce`` is told.
    Raises UserError when nothing fits, or for arguments that cannot be estimated.
    """
    known = _known_tiers(checkout, script, argv, environ)
    walk = _Walk(checkout, script, list(argv), environ, card, announce)
    answered = any(fits(one.found, card) for one in known)
    candidates = known if answered else [*walk.candidates(), *known]
    inside = [one for one in candidates if fits(one.found, card)]
    outside = sorted((one for one in candidates if one not in inside), key=lambda one: one.found.reserved)
    if not inside and walk.stopped:
        raise UserError(f"nothing fits in the first {MOST} estimates; run it again to continue (their results are kept)")
    if not inside:
        raise UserError(
            f"nothing fits the {label(card)} less 5 percent: the smallest, {outside[0].name}, needs "
            f"{gigabytes(outside[0].found.on_the_card)} GB"
        )
    if not answered:
        inside.sort(key=_slowness)
    tree = _tree(checkout, script, argv, environ, inside[0])
    copied = _copied(inside[0].found, [one.found for one in candidates])
    return Plan(
        card, inside[0], tuple(inside[1:3]), tuple(outside),
        tuple(replace(branch, figures=copied) if "--blocks_to_swap" in branch.words else branch for branch in tree),
    )  # fmt: skip


def automatic(script: str, argv: Sequence[str], environ: Mapping[str, str], card: int) -> str:
    """Return the tier that ``--preset auto`` means, by its name; in well under a second, and without an estimate.

    That is the largest whose figures, with what else is said, fit the card; where they are not known, the card's own size.
    Raises UserError when there is none.
    """
    smaller = ""
    tier = None
    for tier, run in _tiers_with(script, argv, environ):
        row = cache.shipped(choosing.normalized(choosing.read(script, run, argv)[0]))
        if row is not None and fits(Estimate(**row), card):
            return tier.name
        if row is None and tier.card <= card and not smaller:
            smaller = tier.name
    if tier is None:
        raise UserError(f"--preset auto: {script} has no presets for sizes of GPUs: run `python -m kohya_ext plan {script}`")
    if not smaller:
        raise UserError(f"--preset auto: no preset of {script} fits the {label(card)}: run `python -m kohya_ext plan {script}`")
    return smaller


def _slowness(one: Candidate) -> tuple[float, ...]:
    """Return what sorts candidates, the fastest first: blocks copied over the bus, operations, then memory left unused."""
    return int(one.found.choices.get("blocks_to_swap") or 0), one.found.flops_a_picture, -one.found.reserved


# --- the shipped tiers -----------------------------------------------------------------------------------------------


def _tiers_with(script: str, argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[Tier, RunArguments]]:
    """Yield the tiers of what a script trains, the largest first, and the arguments with each."""
    kind = choosing.read(script, _read(script, argv, environ, ()), argv)[0].kind
    for tier in sorted(tiers(kind), key=lambda tier: -tier.card):
        yield tier, _read(script, argv, environ, (tier.name,))


def _read(script: str, argv: Sequence[str], environ: Mapping[str, str], auto: Sequence[str] | None = None) -> RunArguments:
    """Read a command line as it is before its blocks are compiled: that needs less, and each estimate three times as long."""
    run = read_arguments(script, argv, environ, auto)
    return replace(run, settings=run.settings.with_(selective_torch_compile=False, activation_memory_budget=None))


def _known_tiers(checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[Candidate]:
    """Return the tiers with the user's arguments, those that come to the same once; none unless all figures are known."""
    rows: dict[MemoryConfig, tuple[Tier, dict[str, Any]]] = {}
    for tier, run in _tiers_with(script, argv, environ):
        choices = choosing.normalized(choosing.read(script, run, argv)[0])
        row = cache.find(checkout, choices, run.settings.disable_patch)
        if row is None:
            return []
        rows.setdefault(choices, (tier, row))
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


# --- the walk --------------------------------------------------------------------------------------------------------


@dataclass
class _Walk:
    """A walk down the ladder from the family's recipe with the user's arguments, an estimate at every step."""

    checkout: Checkout
    script: str
    argv: list[str]
    environ: Mapping[str, str]
    card: int
    announce: Callable[[str], None]
    made: int = 0
    tried: list[Candidate] = field(default_factory=list)
    stopped: bool = False
    """Whether the limit was reached."""

    def candidates(self) -> list[Candidate]:
        """Return what was tried: down to what fits, and from there back up to the fastest that still does."""
        run = _read(self.script, self.argv, self.environ, ())
        kind = choosing.read(self.script, run, self.argv)[0].kind
        base = preset_files.base(kind)
        mine = _without_auto(self.argv)
        theirs = {**(run.config.values if run.config is not None else {}), **values_of(mine)}
        start = _whole_batch(["--preset", base.name, *mine] if base is not None else mine, theirs)
        fixed = theirs.keys() - {"train_batch_size", "gradient_accumulation_steps"}
        recipe = str(base.about.get("traded", "")) if base is not None else ""
        points = [_Point("the recipe as it is", {}, recipe)]
        state = attempt(self.checkout, self.script, start, self.environ)
        while (step := _next(state, fixed)) is not None:
            points.append(points[-1].after(step))
            state = after(state, step)
        if self.card < min((tier.card for tier in tiers(kind)), default=0) and not self._try(start, points[-1]):
            return self.tried  # nothing above the smallest fits either
        for index, point in enumerate(points):
            if self._try(start, point):
                if index:
                    self._climb_back(start, points[index - 1].changes, point, fixed)
                break
        return self.tried

    def _try(self, start: Sequence[str], point: _Point) -> bool:
        """Estimate a configuration; return whether it fits. Past the limit nothing is tried, and everything fits."""
        argv = rewritten(start, point.changes)
        run = _read(self.script, argv, self.environ)
        choices = choosing.normalized(choosing.read(self.script, run, argv)[0])
        if cache.find(self.checkout, choices, run.settings.disable_patch) is None:
            if self.made == MOST:
                self.stopped = True
                return True
            if self.made == 0:
                self.announce(f"these arguments are not in the table: up to {MOST} estimates, about 20 seconds each")
            self.made += 1
            self.announce(f"estimate {self.made} of at most {MOST}: {point.name}")
        candidate = Candidate(point.name, tuple(argv), estimate(self.checkout, self.script, run, argv), point.traded)
        if candidate not in self.tried:
            self.tried.append(candidate)
        return fits(candidate.found, self.card)

    def _climb_back(self, start: Sequence[str], before: Changes, point: _Point, fixed: Set[str]) -> None:
        """Find the smallest part that is enough: of the blocks in host memory, if they are, or else of those checkpointed."""
        parts: list[float]
        if (most := point.changes.get("blocks_to_swap")) is not None:
            key, parts = "blocks_to_swap", [*range(int(str(before.get("blocks_to_swap", 0))) + 1, int(str(most)))]
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
    """A place on the way down the ladder."""

    name: str
    """The last change, as words of a command line."""
    changes: Changes
    recipe: str
    """What the family's recipe gives up."""
    taken: tuple[str, ...] = ()
    """The rungs down to here, by name."""

    def after(self, step: Step) -> _Point:
        """Return the next one."""
        taken = self.taken if step.rung.name in self.taken else (*self.taken, step.rung.name)
        return _Point(" ".join(step.words), {**self.changes, **step.changes}, self.recipe, taken)

    @property
    def traded(self) -> str:
        """What it gives up: the recipe's own, and the names of the rungs, whose costs the decision tree has."""
        return "; ".join(filter(None, [self.recipe, ", ".join(self.taken)]))


def _named(key: str, value: object) -> str:
    return " ".join(_words({key: value}))


def _next(run: Attempt, fixed: Set[str]) -> Step | None:
    return next((step for step in steps(run) if not fixed & step.changes.keys()), None)


def _whole_batch(argv: list[str], given: Mapping[str, Any]) -> list[str]:
    """Return arguments with all accumulated pictures in one batch: the ladder divides it as far as it must."""
    pictures = int(given.get("train_batch_size", 1)) * int(given.get("gradient_accumulation_steps", 1))
    if pictures == 1:
        return argv
    return rewritten(argv, {"train_batch_size": pictures, "gradient_accumulation_steps": 1})


# --- the tree --------------------------------------------------------------------------------------------------------


def _tree(
    checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str], answer: Candidate
) -> Iterator[Branch]:
    """Yield the ladder's rungs that could apply to a run of upstream's defaults, and what became of each in the answer."""
    mine = _without_auto(argv)
    run = start = _at_full_size(checkout, script, mine, environ)
    chosen = attempt(checkout, script, answer.argv, environ)
    offered: dict[str, dict[str, object]] = {}
    while (step := next(steps(run), None)) is not None:
        run = after(run, step)
        offered[step.rung.name] = {**offered.get(step.rung.name, {}), **step.changes}
    for rung in LADDER:
        if rung.named_only and start.takes(rung.named_only[0].removeprefix("--")):
            yield Branch(rung, "not estimated", rung.named_only)
        if (offer := offered.get(rung.name)) is None:
            continue
        left = rung.changes(chosen)
        used = {key: chosen.values[key] for key, value in offer.items() if chosen.values.get(key) == value}
        some = {key: chosen.values[key] for key in left if _is_part(start.values.get(key), chosen.values.get(key))}
        if not left and used:
            yield Branch(rung, "taken", _words(used))
        elif used or some:
            yield Branch(rung, "in part", _words({**used, **some}))
        elif values_of(mine).keys() & offer.keys():
            yield Branch(rung, "yours", ())
        elif left:
            yield Branch(rung, "not needed", _words(left))


def _at_full_size(checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str]) -> Attempt:
    """Return a run of upstream's defaults with the user's arguments, and the resolution that the family's recipe begins at."""
    run = attempt(checkout, script, argv, environ)
    base = preset_files.base(choosing.read(script, _read(script, argv, environ, ()), argv)[0].kind)
    if base is None or "resolution" in run.values:
        return run
    recipe = attempt(checkout, script, ["--preset", base.name, *argv], environ)
    return replace(run, values={**run.values, "resolution": recipe.values.get("resolution")})


def _is_part(before: object, now: object) -> bool:
    """Whether a value is a number of blocks, a share of them, or a size that was another before."""
    if isinstance(now, str):
        return before is not None and now != before
    return isinstance(now, (int, float)) and not isinstance(now, bool) and now > 0


#: Bytes a second that PCIe 4.0 x16 moves in one direction.
_BUS = 25e9


def _copied(answer: Estimate, found: Sequence[Estimate]) -> str:
    """Return in words what block swap copies, from the weights of the same model with all blocks on the card; or nothing.

    A block goes and another takes its place, in forward and again in backward (custom_offloading_utils.py).
    """
    precision = ("fp8_base", "fp8_scaled", "full_bf16", "mixed_precision")
    whole = [
        one.parts["weights"]
        for one in found
        if not one.choices.get("blocks_to_swap")
        and "weights" in one.parts
        and all(one.choices.get(name) == answer.choices.get(name) for name in precision)
    ]
    if not whole or not answer.choices.get("blocks_to_swap") or "weights" not in answer.parts:
        return ""
    size = max(whole) - answer.parts["weights"]
    return (
        f"{gigabytes(size)} GB of weights wait in host memory; every batch moves {gigabytes(4 * size)} GB over the bus, "
        f"{4 * size / _BUS:.1f} s at 25 GB/s less what computing hides"
    )


def _words(changes: Changes) -> tuple[str, ...]:
    return tuple(rewritten([], changes))


def attempt(checkout: Checkout, script: str, argv: Sequence[str], environ: Mapping[str, str]) -> Attempt:
    """Return a command line as the ladder looks at it, without the script's own parser, which takes seconds."""
    run = read_arguments(script, argv, environ)
    layers = (
        {key: value.value for key, value in run.presets.values.items()},
        dict(run.config.values) if run.config is not None else {},
        values_of(argv),
    )
    places = [checkout.script(script), checkout.path / "train_network.py", *(checkout.path / "library").glob("*.py")]
    text = "".join(place.read_text(encoding="utf-8", errors="replace") for place in places if place.is_file())
    return Attempt(script, {key: value for layer in layers for key, value in layer.items()}, lambda key: f'"--{key}"' in text)
