"""The features that ``--speed`` turns on and off while a run trains. Patches ask their switch in every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kohya_ext.config.settings import Settings


@dataclass(eq=False)
class Switch:
    """One feature."""

    name: str
    """The name of its option."""
    title: str
    """Its name in messages."""
    exactness: Literal["exact", "close"]
    on: bool = False
    """Whether ``--speed`` has turned it on. It also works if its option is on."""
    is_paused: bool = False
    """Whether it does not work in any case for now."""
    is_chosen: bool = False
    """Whether ``--speed`` decides about it in this run, because its option is not given."""


CUDA_GRAPHS = Switch("cuda_graphs", "CUDA graphs", "exact")
FUSED_OPERATIONS = Switch("fused_operations", "fused operations", "close")

COMPILED_BLOCKS = Switch("selective_torch_compile", "compiled blocks", "close")

ALL = (CUDA_GRAPHS, FUSED_OPERATIONS, COMPILED_BLOCKS)

FUSED_STEPS = Switch("fused_steps", "fused steps of the optimizer", "close")
"""What fused operations do outside the passes that a trial compares. It needs their self-test, and works with any choice."""

_EVERY = (*ALL, FUSED_STEPS)


def may_choose(switch: Switch, settings: Settings) -> bool:
    """Return whether ``--speed`` may turn a feature on: its option is not given, and the results may change as it does."""
    allowed = {"off": (), "exact": ("exact",), "auto": ("exact", "close")}[settings["speed"]]
    is_possible = not {"speed", switch.name} & set(settings.disable_patch) and settings[switch.name] is None
    return is_possible and switch.exactness in allowed


def is_wanted(switch: Switch, settings: Settings) -> bool:
    """Return whether a feature's patch is wanted: its option is on, or ``--speed`` may turn it on."""
    return bool(settings[switch.name]) or may_choose(switch, settings)


def works(switch: Switch, settings: Settings) -> Callable[[], bool]:
    """Return a function that returns whether a feature works now: its option is on, or ``--speed`` has turned it on."""
    is_given = bool(settings[switch.name])
    return lambda: is_given or switch.on


def works_in_steps(settings: Settings) -> Callable[[], bool]:
    """Return a function that returns whether steps of the optimizer are fused now."""
    works_in_passes = works(FUSED_OPERATIONS, settings)
    return lambda: works_in_passes() or FUSED_STEPS.on


def reset() -> None:
    """Let ``--speed`` turn on and decide about no feature."""
    for switch in _EVERY:
        switch.on = switch.is_paused = switch.is_chosen = False


def use(features: Iterable[str], among: Iterable[Switch] = ALL) -> None:
    """Turn on the named features ``among`` some, and the others of them off."""
    names = set(features)
    for switch in among:
        switch.on = switch.name in names


def added() -> list[str]:
    """Return the features that ``--speed`` has turned on."""
    return [switch.name for switch in ALL if switch.is_chosen and switch.on]


def describe(features: Iterable[str]) -> str:
    """Return the features' names for a message."""
    return " and ".join(switch.title for switch in _EVERY if switch.name in set(features)) or "eager passes"
