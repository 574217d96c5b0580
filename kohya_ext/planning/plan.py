"""The fastest configuration that fits a card: a shipped tier where one answers, else a walk down the ladder.

Nothing here imports torch; an estimate that has to be made does (vram/making.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate, estimate
from kohya_ext.planning.memory_savings import LADDER, Attempt, Changes, MemorySaving, Step, after, steps
from kohya_ext.planning.tiers import Tier, fits, tiers
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.introspect import option_names
from kohya_ext.units import gigabytes, label

#: Estimates that one plan makes at most, about 20 seconds each.
MOST = 12


@dataclass(frozen=True)
class Candidate:
    """One way to run a script."""

    name: str
    """A tier, or what the walk changed, in words."""
    command: CommandLine
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


def plan(checkout: Checkout, command: CommandLine, card: int, announce: Callable[[str], None]) -> Plan:
    """Return the fastest configuration of a command line that fits ``card`` bytes less a margin.

    What the user set is kept; batch size and accumulation may change places, their product stays. Answered from what is known
    if the shipped tiers with these arguments are; otherwise up to :data:`MOST` estimates are made, and ``announce`` is told.
    Raises UserError when nothing fits, or for arguments that cannot be estimated.
    """
    known = _known_tiers(checkout, command)
    walk = _Walk(checkout, command, card, announce)
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
    tree = _tree(checkout, command.with_tier(None), inside[0])
    copied = _copied(inside[0].found, [one.found for one in candidates])
    return Plan(
        card, inside[0], tuple(inside[1:3]), tuple(outside),
        tuple(replace(branch, figures=copied) if "--blocks_to_swap" in branch.words else branch for branch in tree),
    )  # fmt: skip


def automatic(command: CommandLine, card: int) -> str:
    """Return the tier that ``--preset auto`` means, by its name; in well under a second, and without an estimate.

    That is the largest whose figures, with what else is said, fit the card; where they are not known, the card's own size.
    Raises UserError when there is none.
    """
    smaller = ""
    tier = None
    for tier, its in _tiers_with(command):
        row = cache.shipped(_choices(its))
        if row is not None and fits(Estimate(**row), card):
            return tier.name
        if row is None and tier.card <= card and not smaller:
            smaller = tier.name
    if tier is None:
        raise UserError(
            f"--preset auto: {command.name} has no presets for sizes of GPUs: run `python -m kohya_ext plan {command.name}`"
        )
    if not smaller:
        raise UserError(
            f"--preset auto: no preset of {command.name} fits the {label(card)}: run `python -m kohya_ext plan {command.name}`"
        )
    return smaller


def _slowness(one: Candidate) -> tuple[float, ...]:
    """Return what sorts candidates, the fastest first: blocks copied over the bus, operations, then memory left unused."""
    return int(one.found.choices.get("blocks_to_swap") or 0), one.found.flops_a_picture, -one.found.reserved


# --- the shipped tiers -----------------------------------------------------------------------------------------------


def _tiers_with(command: CommandLine) -> Iterator[tuple[Tier, CommandLine]]:
    """Yield the tiers of what a script trains, the largest first, and the command line with each."""
    for tier in sorted(tiers(_kind(command)), key=lambda tier: -tier.card):
        yield tier, command.with_tier(tier.name)


def _kind(command: CommandLine) -> str:
    return choosing.read(command.with_tier(None))[0].kind


def _eager(command: CommandLine) -> CommandLine:
    """Return a command line without compiling: that needs less memory, and each estimate takes a third of the time."""
    return command.with_({"selective_torch_compile": False})


def _choices(command: CommandLine) -> MemoryConfig:
    return choosing.normalized(choosing.read(_eager(command))[0])


def _known_tiers(checkout: Checkout, command: CommandLine) -> list[Candidate]:
    """Return the tiers with the user's arguments, those that come to the same once; none unless all figures are known."""
    rows: dict[MemoryConfig, Candidate] = {}
    for tier, its in _tiers_with(command):
        choices = _choices(its)
        row = cache.find(checkout, choices, its.settings.disable_patch)
        if row is None:
            return []
        short = tier.name.rpartition("/")[2] if preset_files.FAMILIES.get(command.name) == tier.family else tier.name
        candidate = Candidate(f"preset {tier.name}", command.with_tier(short), Estimate(**row), str(tier.about["traded"]))
        rows.setdefault(choices, candidate)
    return list(rows.values())


# --- the walk --------------------------------------------------------------------------------------------------------


@dataclass
class _Walk:
    """A walk down the ladder from the family's recipe with the user's arguments, an estimate at every step."""

    checkout: Checkout
    command: CommandLine
    card: int
    announce: Callable[[str], None]
    made: int = 0
    tried: list[Candidate] = field(default_factory=list)
    stopped: bool = False
    """Whether the limit was reached."""

    def candidates(self) -> list[Candidate]:
        """Return what was tried: down to what fits, and from there back up to the fastest that still does."""
        kind = _kind(self.command)
        base = preset_files.base(kind)
        start = _whole_batch(self.command.with_tier(base.name if base is not None else None))
        fixed = self.command.given.keys() - {"train_batch_size", "gradient_accumulation_steps"}
        recipe = str(base.about.get("traded", "")) if base is not None else ""
        points = [_Point("the recipe as it is", {}, recipe)]
        state = attempt(self.checkout, start)
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

    def _try(self, start: CommandLine, point: _Point) -> bool:
        """Estimate a configuration; return whether it fits. Past the limit nothing is tried, and everything fits."""
        command = start.with_(point.changes)
        if cache.find(self.checkout, _choices(command), command.settings.disable_patch) is None:
            if self.made == MOST:
                self.stopped = True
                return True
            if self.made == 0:
                self.announce(f"these arguments are not in the table: up to {MOST} estimates, about 20 seconds each")
            self.made += 1
            self.announce(f"estimate {self.made} of at most {MOST}: {point.name}")
        candidate = Candidate(point.name, command, estimate(self.checkout, _eager(command)), point.traded)
        if candidate not in self.tried:
            self.tried.append(candidate)
        return fits(candidate.found, self.card)

    def _climb_back(self, start: CommandLine, before: Changes, point: _Point, fixed: Set[str]) -> None:
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


def _whole_batch(command: CommandLine) -> CommandLine:
    """Return arguments with all accumulated pictures in one batch: the ladder divides it as far as it must."""
    given = command.given
    pictures = int(given.get("train_batch_size", 1)) * int(given.get("gradient_accumulation_steps", 1))
    if pictures == 1:
        return command
    return command.with_({"train_batch_size": pictures, "gradient_accumulation_steps": 1})


# --- the tree --------------------------------------------------------------------------------------------------------


def _tree(checkout: Checkout, command: CommandLine, answer: Candidate) -> Iterator[Branch]:
    """Yield the ladder's rungs that could apply to a run of upstream's defaults, and what became of each in the answer."""
    run = start = _at_full_size(checkout, command)
    chosen = attempt(checkout, answer.command)
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
        elif command.given.keys() & offer.keys():
            yield Branch(rung, "yours", ())
        elif left:
            yield Branch(rung, "not needed", _words(left))


def _at_full_size(checkout: Checkout, command: CommandLine) -> Attempt:
    """Return a run of upstream's defaults with the user's arguments, and the resolution that the family's recipe begins at."""
    run = attempt(checkout, command)
    base = preset_files.base(_kind(command))
    if base is None or "resolution" in run.values:
        return run
    recipe = attempt(checkout, command.with_tier(base.name))
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
    return tuple(option_words(changes))


def attempt(checkout: Checkout, command: CommandLine) -> Attempt:
    """Return a command line as the ladder looks at it, without the script's own parser, which takes seconds."""
    return Attempt(command.name, command.values, option_names(checkout.script(command.name)).__contains__)
