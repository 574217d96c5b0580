"""The blocks that gradient checkpointing covers: one by one, each with a switch of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Target, takes
from kohya_ext.sdscripts.families import FAMILIES

#: What a block's own forward is called below the one that checkpoints it.
_INNER = ("_forward", "forward_body")

#: The layers of a stage of SD1.5's U-Net, which is a block there and checkpoints them one by one.
_LAYERS = ("resnets", "attentions")


def on_enable(replace: Callable[[Any, Settings], Any]) -> tuple[Target, ...]:
    """Targets by which a patch replaces ``enable_gradient_checkpointing`` of every such model."""
    return tuple(
        Target(family.module, f"{family.model}.enable_gradient_checkpointing", replace, takes("self"), body="runs")
        for family in FAMILIES
    )


def covered_blocks(model: Any) -> list[Any]:
    """Return the blocks of a model that are checkpointed now, in the order of its modules."""
    return [block for block in model.modules() if block is not model and _is_covered(block)]


def _is_covered(block: Any) -> bool:
    return getattr(block, "gradient_checkpointing", None) is True and bool(recomputed(block))


def recomputed(block: Any) -> list[tuple[Any, str]]:
    """Return what runs again in backward where a block is checkpointed, as modules and names of their methods."""
    if (inner := next((name for name in _INNER if hasattr(block, name)), None)) is not None:
        return [(block, inner)]
    return [(layer, "forward") for layers in _LAYERS for layer in getattr(block, layers, ())]
