"""The remark on a run that is predicted not to fit its GPU: the change that helps, in memory and time, and a preset that fits.

It uses known estimates only, so that a start is not delayed. Nothing here imports torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

from kohya_ext.config import gui_files
from kohya_ext.config.command_line import CommandLine, quoted
from kohya_ext.estimate import machine, predict, step_time
from kohya_ext.estimate.result import Estimate
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.planning.memory_savings import Attempt, Step, steps
from kohya_ext.planning.tiers import MARGIN, fits, tiers
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import gigabytes


@dataclass(frozen=True)
class _Change:
    """A memory saving with the known estimate of the run after it."""

    step: Step
    command: CommandLine
    estimate: Estimate


def remark(checkout: Checkout, args: Namespace, command: CommandLine, gpu: InstalledGpu) -> str | None:
    """Return one line about a run's final arguments; None if they fit the GPU, or if their memory is not known."""
    now = predict.known(checkout, args, command)
    if now is None or fits(now, gpu.memory) or command.settings["vram_budget"] is not None:
        return None
    changes = list(_changes(checkout, args, command, gpu))
    fitting = [change for change in changes if fits(change.estimate, gpu.memory)]
    best = next(iter(fitting), None) or min(changes, key=lambda change: change.estimate.total, default=None)
    share = f"{1 - MARGIN:.0%} of this GPU's {gigabytes(gpu.memory)}"
    parts = [f"this run is predicted to need {gigabytes(now.total)} GB, more than {share}"]
    if best is not None and best.estimate.total < now.total:
        parts.append(_effect(best, now, command, gpu))
    parts.extend(_preset(args, command, gpu.memory))
    return "; ".join(parts)


def _changes(checkout: Checkout, args: Namespace, command: CommandLine, gpu: InstalledGpu) -> Iterator[_Change]:
    """Yield the changes whose estimates are known, the cheapest first."""
    known = vars(args)
    values = {**known, **{name: value for name, value in command.settings.values().items() if value is not None}}
    for step in steps(Attempt(command.name, values, known.__contains__, bf16=gpu.has_bf16)):
        changed = command.with_(step.changes)
        estimate = predict.known(checkout, Namespace(**{**known, **step.changes}), changed)
        if estimate is not None:
            yield _Change(step, changed, estimate)


def _effect(change: _Change, now: Estimate, command: CommandLine, gpu: InstalledGpu) -> str:
    here = machine.of(gpu.name, gpu.memory)
    pairs = ((change.estimate, change.command), (now, command))
    times = [] if here is None else [step_time.predict(estimate, each, here) for estimate, each in pairs]
    seconds = [step_time.format_seconds(time.seconds) for time in times if time is not None]
    cost = f" ({seconds[0]} instead of {seconds[1]} per step)" if len(seconds) == 2 else ""
    return f"{quoted(change.step.words)} would bring it to {gigabytes(change.estimate.total)} GB{cost}"


def _preset(args: Namespace, command: CommandLine, card: int) -> Iterator[str]:
    """Yield what to type for the largest preset of this kind of model that fits; nothing if none does."""
    config = predict.configuration(args, command)
    every = tiers(config.kind) if config is not None else ()
    fitting = [tier for tier in every if tier.estimate is not None and fits(tier.estimate, card)]
    if not fitting:
        return
    name = max(fitting, key=lambda tier: tier.card).name
    is_gui = command.config is not None and gui_files.is_from_gui(command.config.values)
    words = ("export" if is_gui else "show", name, "--script", command.name, *(("--for", "kohya_ss") if is_gui else ()))
    what = "writes a file for the GUI" if is_gui else "shows settings that fit"
    yield f"`{quoted(['python', '-m', 'kohya_ext', 'presets', *words])}` {what}"
