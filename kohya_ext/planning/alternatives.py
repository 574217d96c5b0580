"""Other configurations of a command line that train the same, for `tune` to measure: those that fit, the fastest first.

They differ in gradient checkpointing, swapped blocks, the split of a step's images into micro-batches, attention, and the
base's 8 bits. If the command line has a preset for a GPU size, the other sizes are among them. Nothing here imports torch; a
new estimate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.config.settings import AUTO
from kohya_ext.dry_run import estimation
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config, step_time, tuned
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.result import Estimate
from kohya_ext.planning.bisection import first_that
from kohya_ext.planning.memory_savings import KEPT, SHARE, Attempt, Changes, less_checkpointing, most_swapped
from kohya_ext.planning.plan import (
    Candidate,
    attempt,
    can_have_8_bit_base,
    eager,
    fastest_first,
    known_tiers,
    normalized_config,
)
from kohya_ext.planning.tiers import fits
from kohya_ext.sdscripts.checkouts import Checkout

#: The most configurations.
MOST = 10

#: Options that a tune changes although the user gave them -> the value that turns them off.
_FREE: Mapping[str, object] = {
    "gradient_checkpointing": False,
    SHARE: 1,
    KEPT: False,
    "blocks_to_swap": 0,
}

_UPSTREAM_8_BITS = ("fp8_base", "fp8_base_unet", "fp8_scaled")

#: Ratio of predicted seconds above which a configuration is not worth measuring: twice the error of a prediction.
_MUCH_SLOWER = 1.3

#: Shares of the checkpointed blocks.
_RATIOS = (0.25, 0.5, 0.75)


@dataclass
class Search:
    """A search for configurations that fit ``card`` bytes. ``may_estimate`` is asked before an estimate of 20 to 60 seconds."""

    checkout: Checkout
    command: CommandLine
    card: int
    gpu: Gpu
    may_estimate: Callable[[], bool]
    only_faster: bool = True
    """Whether configurations that are predicted to be slower than the command line are left out."""
    candidates: list[Candidate] = field(default_factory=list)
    is_complete: bool = True
    """Whether no estimate was left out."""

    def run(self) -> list[Candidate]:
        """Return the configurations that fit, the fastest first, without the command line's own."""
        free = start = _freed(self.command)
        if _tiers_of(self.command):
            start = free.with_tier(_base(self.command))
        can_have_8_bits = self._can_have_8_bits(start)
        if start is not free:
            self.candidates += known_tiers(self.checkout, free)
            self.candidates += known_tiers(self.checkout, free, experimental=True) if can_have_8_bits else []
        starts = [*self._starts(attempt(self.checkout, start, self.gpu), can_have_8_bits)]
        with estimation.several() as pool:
            searches = [*pool.map(partial(self._least_savings, start), starts)]
        self.candidates += [candidate for estimated in searches for candidate in estimated]
        own, images = normalized_config(self.command), _images(self.command)
        fitting = [each for each in self.candidates if fits(each.estimate, self.card) and _images(each.command) == images]
        distinct = {normalized_config(each.command): each for each in reversed(fitting)}
        distinct.pop(own, None)
        ranked = self._promising(fastest_first([*reversed(distinct.values())], self.gpu))
        return [each for each in ranked if not self.only_faster or self._may_be_faster(each)][:MOST]

    def _can_have_8_bits(self, start: CommandLine) -> bool:
        """Return whether a command line can have an 8-bit base, also instead of upstream's 8 bits."""
        is_mixed = start.values.get("mixed_precision") in ("bf16", "fp16")
        return is_mixed and can_have_8_bit_base(self.checkout, start.with_(dict.fromkeys(_UPSTREAM_8_BITS)), self.gpu)

    def _promising(self, ranked: list[Candidate]) -> list[Candidate]:
        """Return configurations without those that are predicted to be much slower than another one with the same base."""
        times = step_time.slowness([each.estimate for each in ranked], self.gpu)
        best: dict[object, float] = {}
        promising = []
        for candidate, time in zip(ranked, times, strict=True):
            if time <= _MUCH_SLOWER * best.setdefault(tuned.base_of(candidate.command), time):
                promising.append(candidate)
        return promising

    def _may_be_faster(self, candidate: Candidate) -> bool:
        """Return whether a configuration is predicted to be faster than the command line, as far as both are known."""
        known = cache.find(self.checkout, normalized_config(self.command), self.command.settings.disable_patch)
        if known is None:
            return True
        theirs, own = step_time.slowness([candidate.estimate, Estimate(**known)], self.gpu)
        return theirs < own

    def _starts(self, run: Attempt, can_have_8_bits: bool) -> Iterator[Changes]:
        """Yield the changes with which the search for savings begins."""
        attention: Changes = {}
        if run.family is not None and run.family.unet and run.has("xformers", "mem_eff_attn"):
            attention = {"sdpa": True, "xformers": False, "mem_eff_attn": False}
        eight_bits: Changes = {"base_precision": "int8", **dict.fromkeys(filter(run.has, _UPSTREAM_8_BITS), False)}
        for split in _splits(run):
            yield {**attention, **split}
            if can_have_8_bits:
                yield {**attention, **split, **eight_bits}
                if run.family is not None and run.family.unet:
                    yield {**attention, **split, **eight_bits, "int8_convolutions": True}

    def _least_savings(self, start: CommandLine, changes: Changes) -> list[Candidate]:
        """Search the configuration with the fewest memory savings that fits, and return those that were estimated."""
        run = attempt(self.checkout, start.with_(changes), self.gpu)
        savings = [step for step in _savings(run) if run.allows(step)]
        estimated: list[Candidate] = []

        def fit(places: Sequence[int]) -> list[bool]:
            tried = [self._candidate(start, {**changes, **savings[place]}) for place in places]
            estimated.extend(candidate for candidate in tried if candidate is not None)
            return [candidate is not None and fits(candidate.estimate, self.card) for candidate in tried]

        first_that(len(savings), fit)
        return estimated

    def _candidate(self, start: CommandLine, changes: Changes) -> Candidate | None:
        """Return a configuration with its estimate; None if it cannot be estimated, or not in time."""
        command = start.with_(changes)
        known = cache.find(self.checkout, normalized_config(command), command.settings.disable_patch)
        if known is None and not self.may_estimate():
            self.is_complete = False
            return None
        try:
            estimate = estimation.estimate(self.checkout, eager(command))
        except UserError:
            return None
        return Candidate(" ".join(option_words(changes)), command, estimate)


def _savings(run: Attempt) -> list[Changes]:
    """Return the savings in the order of their memory: no checkpointing, less than all, all, and swapped blocks."""
    whole: Changes = {"gradient_checkpointing": True}
    savings: list[Changes] = [{"gradient_checkpointing": False}]
    savings += [{**whole, **less} for less in less_checkpointing(run, _RATIOS)]
    savings += [whole]
    if run.trains_network and (most := most_swapped(run)):
        rest = (*less_checkpointing(run, ()), {})
        savings += [{**whole, "blocks_to_swap": number, **less} for number in (most // 2, most) for less in rest]
    return savings


def _splits(run: Attempt) -> Iterator[Changes]:
    """Yield how a step's images can be split into micro-batches: as given, then fewer and larger ones."""
    yield {}
    batch, accumulation = run.number("train_batch_size", 1), run.number("gradient_accumulation_steps", 1)
    if run.has("dataset_config", "in_json"):  # they set batch sizes themselves
        return
    for parts in range(accumulation - 1, 0, -1):
        if accumulation % parts == 0:
            yield {"train_batch_size": batch * (accumulation // parts), "gradient_accumulation_steps": parts}


def _images(command: CommandLine) -> int:
    """Return the images of an optimizer step."""
    config = memory_config.read(command)[0]
    return config.train_batch_size * config.gradient_accumulation_steps


def _tiers_of(command: CommandLine) -> list[str]:
    """Return the presets of a command line that are for a GPU size."""
    names = command.given.get("preset", ())
    return [name for name in names if name == AUTO or _is_tier(name, command.name)]


def _is_tier(name: str, script: str) -> bool:
    presets = preset_files.load([name], script).presets
    return bool(presets) and "vram_gb" in presets[-1].about


def _freed(command: CommandLine) -> CommandLine:
    """Return a command line without what a tune changes, and without presets for a GPU size."""
    if tiers := _tiers_of(command):
        selected = command.values
        others = [name for name in command.given["preset"] if name not in tiers]
        command = replace(command.with_({"preset": None}), environ=_without_preset(command.environ))
        command = replace(command, argv=(*(word for name in others for word in ("--preset", name)), *command.argv))
        if (model := selected.get("model_type")) is not None:  # of a preset, which it selects
            command = command.with_({"model_type": model})
    command = command.with_(dict.fromkeys(_FREE))
    return command.with_({name: off for name, off in _FREE.items() if name in command.given})


def _base(command: CommandLine) -> str:
    """Return the base preset of a command line's kind of model."""
    base = preset_files.base(memory_config.read(command)[0].kind)
    assert base is not None, "a family with tiers has a base preset"
    return base.name


def _without_preset(environ: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in environ.items() if name != "KOHYA_EXT_PRESET"}
