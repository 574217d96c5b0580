"""What ``--speed`` is predicted to turn on in a run, by known estimates. Nothing here imports torch.

A run tries the same variants before its first step, and keeps the fastest one that fits (:mod:`kohya_ext.speed.trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, memory_config, step_time
from kohya_ext.estimate.gpus import WINDOWS, Gpu, this_host
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.estimate.seconds import Prediction
from kohya_ext.planning.tiers import Tier, fits
from kohya_ext.speed.switches import CUDA_GRAPHS, FUSED_OPERATIONS, Switch, describe, may_choose
from kohya_ext.units import gigabytes

#: The features that are predicted. Whether a run has time to compile blocks depends on its length.
_PREDICTED = (CUDA_GRAPHS, FUSED_OPERATIONS)

#: How many times as fast as eager passes a variant must be, as in a run's trial.
LEAST_GAIN = 1.03

#: Returns the known estimate of a normalized configuration.
LookUp = Callable[[MemoryConfig], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Choice:
    """A variant with its figures."""

    features: tuple[str, ...]
    """Names of switches; none for the run as it is without ``--speed``."""
    estimate: Estimate
    time: Prediction
    """Of an optimizer step."""

    @property
    def seconds_per_image(self) -> float:
        """Predicted seconds of an image."""
        return self.time.seconds / self.estimate.images

    @property
    def words(self) -> str:
        """The chosen features for a message; empty without any."""
        return describe(self.features) if self.features else ""


def choice(command: CommandLine, gpu: Gpu, card: int, look_up: LookUp, triton: bool) -> Choice | None:
    """Return the predicted choice for a run on a GPU with ``card`` bytes, with or without ``triton`` installed.

    None if the run's own estimate is not known. Variants without a known estimate are left out.
    """
    tried = (_known(command, features, gpu, look_up) for features in variants(command, gpu, triton))
    best, *others = tried
    for other in others:
        if best and other and fits(other.estimate, card) and other.time.seconds * LEAST_GAIN < best.time.seconds:
            best = other
    return best


def of_tier(tier: Tier, gpu: Gpu, triton: bool | None = None) -> Choice | None:
    """Return the predicted choice with a shipped tier and nothing else; by default Triton as on most machines of that kind."""
    command = CommandLine(Path(preset_files.scripts(tier.family)[0]), ["--preset", tier.name], {}, has_bf16=True)
    return choice(command, gpu, tier.card, cache.shipped, has_triton(gpu) if triton is None else triton)


def lines(command: CommandLine, gpu: Gpu, card: int, look_up: LookUp) -> list[str]:
    """Return a line for the console about what ``--speed`` may turn on in a run; none if it may turn on nothing."""
    triton = has_triton(gpu)
    every = list(variants(command, gpu, triton))
    best = choice(command, gpu, card, look_up, triton)
    option = f"--speed {command.settings['speed']}"
    if len(every) == 1 or best is None:
        return []
    unknown = [features for features in every if _known(command, features, gpu, look_up) is None]
    if unknown:
        flags = " ".join(f"--{name}" for name in every[-1])
        return [f"{option}: also tries {describe(every[-1])} on your GPU; `estimate` with {flags} predicts them"]
    if not best.features:
        return [f"{option}: nothing is predicted to make the steps faster"]
    time = step_time.predict(best.estimate, with_features(command, best.features), gpu)
    assert time is not None, "a choice has a time"
    return [
        f"{option}: {best.words}, predicted {step_time.format_seconds(time.seconds)} per step and "
        f"{gigabytes(best.estimate.total)} GB; a test on your GPU decides"
    ]


def variants(command: CommandLine, gpu: Gpu | None = None, triton: bool = True) -> Iterator[tuple[str, ...]]:
    """Yield the features of each variant of a run, those with fewer features first."""
    features = [switch.name for switch in _possible(command, gpu, triton)]
    for count in range(len(features) + 1):
        yield from combinations(features, count)


def with_features(command: CommandLine, features: Sequence[str]) -> CommandLine:
    """Return the command line of a run that is forced to use some features."""
    return command.with_(dict.fromkeys(features, True))


def _known(command: CommandLine, features: tuple[str, ...], gpu: Gpu, look_up: LookUp) -> Choice | None:
    changed = with_features(command, features)
    row = look_up(_normalized(changed))
    estimate = None if row is None else Estimate(**row)
    time = None if estimate is None else step_time.by_rates(estimate, changed, gpu)
    return None if estimate is None or time is None else Choice(features, estimate, time)


def _possible(command: CommandLine, gpu: Gpu | None, triton: bool) -> list[Switch]:
    """Return the features that a run may try: what it may choose, and what its settings and the GPU have."""
    settings, config = command.settings, _normalized(command)
    if settings["vram_budget"] is not None or config.num_processes is not None or config.deepspeed:
        return []
    allowed = [switch for switch in _PREDICTED if may_choose(switch, settings)]
    if not triton or (gpu is not None and not gpu.has_bf16):
        allowed = [switch for switch in allowed if switch is not FUSED_OPERATIONS]
    return [switch for switch in allowed if _normalized(with_features(command, [switch.name])) != config]


def _normalized(command: CommandLine) -> MemoryConfig:
    return memory_config.normalized(memory_config.read(command)[0])


def has_triton(gpu: Gpu) -> bool:
    """Return whether a GPU's machine has Triton: PyTorch brings it along, except under Windows."""
    return gpu.host != WINDOWS or (this_host() == WINDOWS and find_spec("triton") is not None)
