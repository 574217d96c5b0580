"""The fastest configuration that fits a GPU: a shipped tier if its memory is known, otherwise a search over memory savings.

Nothing here imports torch; a new estimate does (kohya_ext.dry_run.estimation).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.config.preset_files import NotForScriptError
from kohya_ext.console import note
from kohya_ext.dry_run import estimation
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config, step_time, tuned
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.estimate.seconds import Work, bus_seconds
from kohya_ext.estimate.tuned import Tuned
from kohya_ext.installed_gpus import first_gpu
from kohya_ext.planning.bisection import first_that
from kohya_ext.planning.memory_savings import (
    MEMORY_SAVINGS,
    Attempt,
    Changes,
    MemorySaving,
    Step,
    after,
    less_checkpointing,
    steps,
)
from kohya_ext.planning.tiers import Tier, fits, tiers
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.constraints import ON_HOST, ON_HOST_RATIO
from kohya_ext.sdscripts.introspect import option_names
from kohya_ext.units import SMALLEST_SHARE, gigabytes, label

#: Maximum number of new estimates for one plan.
MAX_ESTIMATES = 16


class NothingFitsError(UserError):
    """No configuration fits the GPU."""


@dataclass(frozen=True)
class Candidate:
    """A configuration of a script and its estimate."""

    name: str
    """The preset, or the flags of the last change."""
    command: CommandLine
    estimate: Estimate
    traded: str = ""
    """The drawbacks of its preset and changes."""
    measured: Tuned | None = None
    """What `tune` measured on this GPU; None without it."""


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
    gpu: Gpu
    """The GPU whose seconds rank the configurations."""
    answer: Candidate
    others: tuple[Candidate, ...]
    """The next best that fit, the fastest first."""
    experimental: Candidate | None
    """A faster one with an 8-bit base; None without it, and where nothing fits without an 8-bit base."""
    too_big: tuple[Candidate, ...]
    """Configurations that do not fit, the smallest first."""
    tree: tuple[Branch, ...]


def plan(checkout: Checkout, command: CommandLine, card: int, gpu: Gpu, announce: Callable[[str], None]) -> Plan:
    """Return the fastest configuration of a command line on a GPU that fits ``card`` bytes less a margin.

    The user's options are kept, and so is the product of batch size and accumulation. If the memory of the shipped tiers
    with these arguments is not known, makes up to :data:`MAX_ESTIMATES` estimates and reports them through ``announce``.
    Raises NothingFitsError when nothing fits, and UserError for arguments that cannot be estimated.
    """
    known = known_tiers(checkout, command)
    search = _Search(checkout, command, card, announce)
    answered = any(fits(candidate.estimate, card) for candidate in known)
    candidates = known if answered else [*search.candidates(), *known]
    inside = [candidate for candidate in candidates if fits(candidate.estimate, card)]
    outside = [candidate for candidate in candidates if candidate not in inside]
    outside.sort(key=lambda candidate: candidate.estimate.reserved)
    eight_bits = _with_8_bit_base(search, gpu, answered) if can_have_8_bit_base(checkout, command, gpu) else []
    if not inside and not eight_bits and search.stopped:
        raise UserError(f"nothing fits in the first {MAX_ESTIMATES} estimates; rerun to continue (results are cached)")
    if not inside and not eight_bits:
        raise NothingFitsError(
            f"nothing fits the {label(card)} less 5 percent; the smallest configuration, {outside[0].name}, needs "
            f"{gigabytes(outside[0].estimate.total)} GB"
        )
    if not answered:
        inside = fastest_first(inside, gpu)
    best, *rest = _as_measured(inside or eight_bits, gpu)
    faster = bool(inside and eight_bits) and fastest_first([best, eight_bits[0]], gpu)[0] is not best
    tree = _tree(checkout, command.with_tier(None), best, gpu)
    copied = _copy_cost(best.estimate, [candidate.estimate for candidate in candidates])
    return Plan(
        card, gpu, best, tuple(rest[:2]), eight_bits[0] if faster else None, tuple(outside),
        tuple(replace(branch, figures=copied) if "--blocks_to_swap" in branch.words else branch for branch in tree),
    )  # fmt: skip


def automatic(command: CommandLine, card: int) -> str:
    """Return the name of the tier for ``--preset auto``, in well under a second and without a new estimate.

    This is the largest tier that fits with the user's arguments or, where its memory is not known, the tier of the GPU's size.
    If `tune` has measured that one on this GPU, it is the fastest measured tier. Raises UserError when there is none.
    """
    if command.name not in preset_files.FAMILIES:
        raise NotForScriptError(f"--preset auto: {command.name} has no presets for GPU sizes")
    predicted = _predicted_tier(command, card)
    here = first_gpu()
    runs = tuned.of_first_gpu() if here is not None and here.memory == card else []
    measured = {tier.name: run for tier, each in _tiers_with(command) if (run := tuned.find(runs, each))} if runs else {}
    fastest = min((name for name in measured if not measured[name].failed), key=lambda name: measured[name].seconds, default="")
    if not fastest or predicted not in measured:
        return predicted
    _say_measured(fastest, measured[fastest].day)
    return fastest


@functools.cache
def _say_measured(tier: str, day: str) -> None:
    """Print, once in a process, why a tier was chosen."""
    note(f"--preset auto: {tier} was the fastest preset that `tune` measured on this GPU, on {day}")


def _predicted_tier(command: CommandLine, card: int) -> str:
    tier = None
    for tier, tier_command in _tiers_with(command):
        row = cache.shipped(normalized_config(tier_command))
        fitting = tier.card <= card / SMALLEST_SHARE if row is None else fits(Estimate(**row), card)
        if fitting:
            return tier.name
    if tier is None:
        raise NotForScriptError(
            f"--preset auto: {command.name} has no presets for GPU sizes; run `python -m kohya_ext plan {command.name}`"
        )
    raise UserError(
        f"--preset auto: no preset of {command.name} fits the {label(card)}; run `python -m kohya_ext plan {command.name}`"
    )


def fastest_first(candidates: Sequence[Candidate], gpu: Gpu) -> list[Candidate]:
    """Return candidates by the time of an image, then by reserved memory, the largest first.

    If that time is not known for all, those with fewer swapped blocks rank first, then those with fewer operations.
    """
    estimates = [candidate.estimate for candidate in candidates]
    timed = step_time.all_counted(estimates)
    swapped = [0 if timed else int(estimate.config.get("blocks_to_swap") or 0) for estimate in estimates]
    keys = zip(swapped, step_time.slowness(estimates, gpu), (-estimate.reserved for estimate in estimates), strict=True)
    ranked = sorted(zip(keys, candidates, strict=True), key=lambda pair: pair[0])
    return [candidate for _, candidate in ranked]


def _as_measured(ranked: Sequence[Candidate], gpu: Gpu) -> list[Candidate]:
    """Return ranked candidates with what `tune` measured on this GPU, if it is the one they are ranked for.

    The fastest measured one comes first if the first one was measured, too. One that was out of memory comes last.
    """
    here = first_gpu()
    runs = tuned.of_first_gpu() if here is not None and here.name == gpu.name else []
    measured = [replace(each, measured=tuned.find(runs, each.command)) for each in ranked]
    if not measured or measured[0].measured is None:
        return measured

    def key(candidate: Candidate) -> tuple[int, float]:
        run = candidate.measured
        if run is None:
            return 1, 0.0
        return (2 if run.failed else 0), run.seconds

    return sorted(measured, key=key)


# --- the shipped tiers -----------------------------------------------------------------------------------------------


def _tiers_with(command: CommandLine, experimental: bool = False) -> Iterator[tuple[Tier, CommandLine]]:
    """Yield the tiers of a script's kind of model, the largest first, with the command line for each."""
    for tier in sorted(tiers(_kind(command), experimental), key=lambda tier: -tier.card):
        yield tier, command.with_tier(tier.name)


def _kind(command: CommandLine) -> str:
    return memory_config.read(command.with_tier(None))[0].kind


def eager(command: CommandLine) -> CommandLine:
    """Return a command line with compiling off: compiled blocks need less memory, but three times as long to estimate."""
    return command.with_({"selective_torch_compile": False})


def normalized_config(command: CommandLine) -> MemoryConfig:
    """Return the configuration of a command line's estimate."""
    return memory_config.with_bf16(memory_config.normalized(memory_config.read(eager(command))[0]))


def known_tiers(checkout: Checkout, command: CommandLine, experimental: bool = False) -> list[Candidate]:
    """Return the distinct tiers with the user's arguments; none unless the memory of all tiers is known."""
    rows: dict[MemoryConfig, Candidate] = {}
    for tier, tier_command in _tiers_with(command, experimental):
        config = normalized_config(tier_command)
        row = cache.find(checkout, config, tier_command.settings.disable_patch)
        if row is None:
            return []
        short = tier.name.rpartition("/")[2] if preset_files.FAMILIES.get(command.name) == tier.family else tier.name
        candidate = Candidate(f"preset {tier.name}", command.with_tier(short), Estimate(**row), str(tier.about["traded"]))
        rows.setdefault(config, candidate)
    return list(rows.values())


# --- an 8-bit base ----------------------------------------------------------------------------------------------------


def can_have_8_bit_base(checkout: Checkout, command: CommandLine, gpu: Gpu) -> bool:
    """Return whether the user's options and the GPU allow an 8-bit base that they do not ask for."""
    base = preset_files.base(_kind(command))
    run = attempt(checkout, command.with_tier(base.name if base is not None else None), gpu)
    changes = next((step.changes for step in steps(run) if "base_precision" in step.changes), None)
    disabled = not {"base_precision", "*"}.isdisjoint(command.settings.disable_patch)
    return changes is not None and not disabled and not command.given.keys() & changes.keys()


def _with_8_bit_base(search: _Search, gpu: Gpu, answered: bool) -> list[Candidate]:
    """Return the configurations with an 8-bit base that fit, the fastest first: tiers, or those of another search."""
    command = search.command.with_({"base_precision": "int8"})
    if answered:
        candidates = known_tiers(search.checkout, search.command, experimental=True)
    else:
        searched = replace(search, command=command, tried=[], stopped=False).candidates()
        costs = next(saving.costs for saving in MEMORY_SAVINGS if saving.name == "8-bit base")
        candidates = [replace(each, traded="; ".join(filter(None, [costs, each.traded]))) for each in searched]
    return fastest_first([each for each in candidates if fits(each.estimate, search.card)], gpu)


# --- the search ------------------------------------------------------------------------------------------------------


@dataclass
class _Search:
    """A search over memory savings from the family's base preset with the user's arguments, with an estimate for each."""

    checkout: Checkout
    command: CommandLine
    card: int
    announce: Callable[[str], None]
    measured: int = 0
    tried: list[Candidate] = field(default_factory=list)
    stopped: bool = False
    """Whether :data:`MAX_ESTIMATES` was reached."""

    def candidates(self) -> list[Candidate]:
        """Return all configurations tried: adds savings until they fit, then reduces them while they still fit."""
        kind = _kind(self.command)
        base = preset_files.base(kind)
        start = _without_accumulation(self.command.with_tier(base.name if base is not None else None))
        fixed = self.command.given.keys() - {"train_batch_size", "gradient_accumulation_steps"}
        recipe = str(base.about.get("traded", "")) if base is not None else ""
        points = [_Point("the base preset", {}, recipe)]
        state = attempt(self.checkout, start)
        while (step := _next(state, fixed)) is not None:
            points.append(points[-1].after(step))
            state = after(state, step)
        if self.card < min((tier.card for tier in tiers(kind)), default=0) and not self._try(start, [points[-1]])[0]:
            return self.tried  # not even the smallest fits
        together = estimation.together()
        for first in range(0, len(points), together):
            fitting = self._try(start, points[first : first + together])
            if any(fitting):
                index = first + fitting.index(True)
                self._reduce(start, points[index - 1].changes if index else {}, points[index], fixed)
                break
        return self.tried

    def _try(self, start: CommandLine, points: Sequence[_Point]) -> list[bool]:
        """Estimate configurations; return whether each fits. Beyond the limit, return True without an estimate."""
        asked = [(point, start.with_(point.changes)) for point in points]
        within = [pair for pair in asked if self._may_estimate(*pair)]
        estimates = estimation.estimate_all(self.checkout, [eager(command) for _, command in within])
        fitting = dict.fromkeys(map(id, points), True)
        for (point, command), estimate in zip(within, estimates, strict=True):
            candidate = Candidate(point.name, command, estimate, point.traded)
            if candidate not in self.tried:
                self.tried.append(candidate)
            fitting[id(point)] = fits(estimate, self.card)
        return [*fitting.values()]

    def _may_estimate(self, point: _Point, command: CommandLine) -> bool:
        """Announce a configuration whose estimate is not known. Return False beyond the limit."""
        if cache.find(self.checkout, normalized_config(command), command.settings.disable_patch) is not None:
            return True
        if self.measured == MAX_ESTIMATES:
            self.stopped = True
            return False
        if self.measured == 0:
            self.announce(f"no known estimate for these arguments; making up to {MAX_ESTIMATES}, of 20 to 60 seconds each")
        self.measured += 1
        self.announce(f"estimate {self.measured} of at most {MAX_ESTIMATES}: {point.name}")
        return True

    def _reduce(self, start: CommandLine, before: Changes, point: _Point, fixed: Set[str]) -> None:
        """Swap as few blocks as fit, else keep as few states on the host, else recompute as little.

        No other saving can be taken in part, but transformers may be faster with more swapped blocks and their attention kept:
        blocks are copied during the computation, within what the bus can carry.
        """
        run = attempt(self.checkout, start.with_(point.changes))
        is_checkpointed = run.has("gradient_checkpointing") and "gradient_checkpointing" not in fixed
        if (limit := point.changes.get("blocks_to_swap")) is not None:
            numbers = range(int(str(before.get("blocks_to_swap", 0))) + 1, int(str(limit)) + 1)
            swaps: list[Changes] = [{"blocks_to_swap": number} for number in numbers]
            fewest = self._reduce_to(start, point, swaps, fixed)
            for kept in less_checkpointing(run, ()) if is_checkpointed else ():
                self._reduce_to(start, point, [{**swap, **kept} for swap in swaps[fewest:]], fixed)
            return
        states: list[Changes] = [{ON_HOST_RATIO: part / 8} for part in range(1, 8)]
        if ON_HOST in point.changes and self._reduce_to(start, point, states, fixed) is not None:
            return
        if is_checkpointed:
            self._reduce_to(start, point, less_checkpointing(run, [part / 8 for part in range(1, 8)]), fixed)

    def _reduce_to(self, start: CommandLine, point: _Point, parts: Sequence[Changes], fixed: Set[str]) -> int | None:
        """Take the first part of a saving that fits, and return its place; None if none does."""
        free = [{key: value for key, value in part.items() if key in point.changes or key not in fixed} for part in parts]
        points = [replace(point, name=" ".join(_words(part)), changes={**point.changes, **part}) for part in free if part]

        def fit(indices: Sequence[int]) -> list[bool]:
            return self._try(start, [points[index] for index in indices])

        place = first_that(len(points), fit, estimation.together())
        return place if place < len(points) else None


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


def _next(run: Attempt, fixed: Set[str]) -> Step | None:
    return next((step for step in steps(run) if not fixed & step.changes.keys()), None)


def _without_accumulation(command: CommandLine) -> CommandLine:
    """Return arguments with accumulation moved into the batch, which the search splits as far as needed."""
    given = command.given
    images = int(given.get("train_batch_size", 1)) * int(given.get("gradient_accumulation_steps", 1))
    if images == 1:
        return command
    return command.with_({"train_batch_size": images, "gradient_accumulation_steps": 1})


# --- the tree --------------------------------------------------------------------------------------------------------


def _tree(checkout: Checkout, command: CommandLine, answer: Candidate, gpu: Gpu) -> Iterator[Branch]:
    """Yield the savings that apply to upstream's defaults, with the status of each in the answer."""
    run = start = _at_full_size(checkout, command, gpu)
    chosen = attempt(checkout, answer.command, gpu)
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
        elif command.given.keys() & offer.keys():
            yield Branch(saving, "fixed", ())
        elif left:
            yield Branch(saving, "not needed", _words(left))


def _at_full_size(checkout: Checkout, command: CommandLine, gpu: Gpu) -> Attempt:
    """Return upstream's defaults with the user's arguments, and with resolution and network of the family's base preset."""
    run = attempt(checkout, command, gpu)
    base = preset_files.base(_kind(command))
    if base is None:
        return run
    recipe = attempt(checkout, command.with_tier(base.name)).values
    assumed = {name: recipe[name] for name in ("resolution", "network_module") if name in recipe}
    return replace(run, values={**assumed, **run.values})


def _is_part(before: object, now: object) -> bool:
    """Return whether a value is a number or fraction of blocks, or a changed text such as a resolution."""
    if isinstance(now, str):
        return before is not None and now != before
    return isinstance(now, (int, float)) and not isinstance(now, bool) and now > 0


#: Bytes per second of PCIe 4.0 x16 in one direction.
_BUS = 25e9


def _copy_cost(answer: Estimate, estimates: Sequence[Estimate]) -> str:
    """Return the amount that block swap copies, as text; empty without it, or without an estimate of the model with no swap."""
    precision = ("fp8_base", "fp8_scaled", "full_bf16", "mixed_precision")
    unswapped = [
        estimate.parts["weights"]
        for estimate in estimates
        if not estimate.config.get("blocks_to_swap")
        and "weights" in estimate.parts
        and all(estimate.config.get(name) == answer.config.get(name) for name in precision)
    ]
    if not unswapped or not answer.config.get("blocks_to_swap") or "weights" not in answer.parts or answer.work is None:
        return ""
    whole, work = max(unswapped), Work.from_row(answer.work)
    size = whole - answer.parts["weights"]
    both_ways = 2 * work.returned > work.copied
    kept = size if both_ways else min(2 * size, whole)  # also those that come in the place of the swapped ones
    return (
        f"{gigabytes(kept)} GB of weights are in host memory; every batch copies {gigabytes(work.copied + work.returned)} GB "
        f"over the bus, {bus_seconds(work, _BUS):.1f} s on PCIe 4.0 x16 minus the overlap with computation"
    )


def _words(changes: Changes) -> tuple[str, ...]:
    return tuple(option_words(changes))


def attempt(checkout: Checkout, command: CommandLine, gpu: Gpu | None = None) -> Attempt:
    """Return a command line for :func:`memory_savings.steps`, without the script's own parser, which takes seconds.

    For a ``gpu``, experimental savings are offered that it supports.
    """
    experimental = gpu is not None and gpu.reason_without_kernels("int8") is None
    bf16 = gpu is None or gpu.has_bf16
    return Attempt(command.name, command.values, option_names(checkout.script(command.name)).__contains__, experimental, bf16)
