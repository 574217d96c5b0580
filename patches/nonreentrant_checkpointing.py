"""Use non-reentrant gradient checkpointing wherever sd-scripts still uses the reentrant kind.

Reentrant checkpointing runs a block without gradients and connects it to the graph only through inputs that require grad.
Without such an input (frozen base, latents, token ids of a text encoder) all gradients in the block are lost, with a warning
at best. Its nested backward pass also makes DistributedDataParallel mark parameters ready twice.
https://pytorch.org/docs/stable/checkpoint.html

All other U-Nets and DiTs of sd-scripts are non-reentrant already. v0.10's XTI_hijack.py is left unpatched: it cannot be
imported with the diffusers version that sd-scripts pins. ``torch.utils.checkpoint.checkpoint`` is never rebound, because
dynamo recognises that function object and would break the graph at any other.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target


def _expect_true(original: object) -> str | None:
    return None if original is True else f"it is {original!r}, not True"


def _default_to_non_reentrant(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def gradient_checkpointing_enable(
        self: Any, gradient_checkpointing_kwargs: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if gradient_checkpointing_kwargs is None:
            gradient_checkpointing_kwargs = {"use_reentrant": False}
        return original(self, gradient_checkpointing_kwargs, *args, **kwargs)

    return gradient_checkpointing_enable


def _expect_kwargs(original: Any) -> str | None:
    parameters = inspect.signature(original).parameters
    if "gradient_checkpointing_kwargs" in parameters:
        return None
    return f"its parameters are {list(parameters)}"


PATCH = Patch(
    name="nonreentrant_checkpointing",
    summary="gradient checkpointing with use_reentrant=False in the SDXL U-Net, ControlNet, LLLite and text encoders",
    targets=(
        # Read at call time by the U-Net's blocks, on which SDXL's ControlNet and LLLite are built.
        Target("library.sdxl_original_unet", "USE_REENTRANT", lambda original, settings: False, _expect_true, body="runs"),
        # All text encoders: sd-scripts does not pass use_reentrant, and transformers 4 then defaults to True.
        Target(
            "transformers.modeling_utils",
            "PreTrainedModel.gradient_checkpointing_enable",
            _default_to_non_reentrant,
            _expect_kwargs,
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="the gradients without checkpointing, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/issues/323",
)
