"""Per-block gradient checkpointing switches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


def embeddings_without_need_of_gradients(model: Any) -> Iterator[Any]:
    """Yield the embedding weights of a transformers model, unless its checkpointing would lose gradients without theirs."""
    import torch

    parts = list(model.modules())
    kinds = [part._gradient_checkpointing_func for part in parts if hasattr(part, "_gradient_checkpointing_func")]
    if kinds and (not reentrant_loses_gradients() or all(_is_non_reentrant(kind) for kind in kinds)):
        for part in parts:
            if isinstance(part, torch.nn.Embedding):
                yield part.weight


def _is_non_reentrant(checkpoint: Any) -> bool:
    """Return whether the checkpointing function of a transformers model is called with ``use_reentrant=False``."""
    return getattr(checkpoint, "keywords", {}).get("use_reentrant") is False


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
