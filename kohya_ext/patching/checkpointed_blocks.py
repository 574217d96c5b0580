"""Per-block gradient checkpointing switches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Target, takes
from kohya_ext.sdscripts.families import FAMILIES

#: Names of a block's inner forward, which its outer forward checkpoints.
_INNER = ("_forward", "forward_body")

#: Layers of a block of SD1.5's U-Net, which checkpoints them separately.
_LAYERS = ("resnets", "attentions")

#: Attribute of a replaced ``torch.utils.checkpoint.CheckpointFunction`` that loses no gradients.
KEEPS_GRADIENTS = "_keeps_gradients"


def reentrant_loses_gradients() -> bool:
    """Return whether ``use_reentrant=True`` still loses the gradients of a block without an input that requires grad."""
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    return not hasattr(getattr(checkpoint, "CheckpointFunction", None), KEEPS_GRADIENTS)


def enable_checkpointing_targets(replace: Callable[[Any, Settings], Any]) -> tuple[Target, ...]:
    """Return targets that replace ``enable_gradient_checkpointing`` of every model."""
    return tuple(
        Target(family.module, f"{family.model}.enable_gradient_checkpointing", replace, takes("self"), body="runs")
        for family in FAMILIES
    )


def checkpointed_blocks(model: Any) -> list[Any]:
    """Return the blocks of a model that are currently checkpointed, in module order."""
    return [block for block in model.modules() if block is not model and _is_checkpointed(block)]


def _is_checkpointed(block: Any) -> bool:
    return getattr(block, "gradient_checkpointing", None) is True and bool(recomputed_methods(block))


def recomputed_methods(block: Any) -> list[tuple[Any, str]]:
    """Return the methods that checkpointing a block recomputes, as pairs of module and method name."""
    if (inner := next((name for name in _INNER if hasattr(block, name)), None)) is not None:
        return [(block, inner)]
    return [(layer, "forward") for layers in _LAYERS for layer in getattr(block, layers, ())]
