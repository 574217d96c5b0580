"""Non-reentrant gradient checkpointing wherever sd-scripts still uses the reentrant kind.

The reentrant kind runs a block without gradients and only connects it to the graph through inputs that require grad. Where
none does (a frozen base, latents, a text encoder's token ids) the gradients of everything in the block are lost, with a
warning at best; and its nested backward makes DistributedDataParallel mark parameters ready twice.
https://pytorch.org/docs/stable/checkpoint.html

Every other U-Net and DiT of sd-scripts is non-reentrant already. Left alone: v0.10's XTI_hijack.py, which says nothing but
cannot be imported with the diffusers that sd-scripts itself pins. ``torch.utils.checkpoint.checkpoint`` is never rebound:
dynamo recognises that very function, and would break the graph at any other.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target


def _unless_true(original: object) -> str | None:
    return None if original is True else f"it is {original!r}, not True"


def _non_reentrant_by_default(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def gradient_checkpointing_enable(
        self: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if gradient_checkpointing_kwargs is None:
            gradient_checkpointing_kwargs = {"use_reentrant": False}
        return original(self, gradient_checkpointing_kwargs, *args, **kwargs)

    return gradient_checkpointing_enable


def _unless_it_takes_kwargs(original: Any) -> str | None:
    parameters = inspect.signature(original).parameters
    if "gradient_checkpointing_kwargs" in parameters:
        return None
    return f"its parameters are {list(parameters)}"


PATCH = Patch(
    name="nonreentrant_checkpointing",
    summary="gradient checkpointing with use_reentrant=False in the SDXL U-Net, ControlNet, LLLite and text encoders",
    targets=(
        # Read at call time by the U-Net's blocks, on which SDXL's ControlNet and LLLite are built.
        Target("library.sdxl_original_unet", "USE_REENTRANT", lambda original, settings: False, _unless_true, body="runs"),
        # Every text encoder: sd-scripts never says which kind, and transformers 4 then takes the reentrant one.
        Target(
            "transformers.modeling_utils",
            "PreTrainedModel.gradient_checkpointing_enable",
            _non_reentrant_by_default,
            _unless_it_takes_kwargs,
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="the gradients without checkpointing, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/issues/323",
)
