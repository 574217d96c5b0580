"""Other people's regional compile, done to sd-scripts' models as its authors do it to theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: diffusers' ``_repeated_blocks`` for the models that it shares with sd-scripts, by the names sd-scripts gives their classes.
REPEATED_BLOCKS = frozenset({"BasicTransformerBlock", "DoubleStreamBlock", "SingleStreamBlock"})


def diffusers(model: Any) -> Any:
    """Compile each repeated block in place, as ``ModelMixin.compile_repeated_blocks`` does; sd-scripts' diffusers is older.

    https://github.com/huggingface/diffusers/blob/v0.35.0/src/diffusers/models/modeling_utils.py
    """
    blocks = [module for module in model.modules() if type(module).__name__ in REPEATED_BLOCKS]
    if not blocks:
        raise LookupError(f"none of diffusers' repeated blocks is in {type(model).__name__}")
    for block in blocks:
        block.compile()
    return model


def accelerate(model: Any) -> Any:
    """Return the model with its repeated blocks wrapped, as ``Accelerator.prepare`` does with ``use_regional_compilation``.

    SDXL's U-Net cannot be run after it: it iterates over the lists of layers that are wrapped.
    """
    from accelerate.utils import compile_regions

    return compile_regions(model)


PEERS: Mapping[str, Callable[[Any], Any]] = {"diffusers": diffusers, "accelerate": accelerate}
