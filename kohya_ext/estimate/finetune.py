"""What the script of a fine-tune does that its family's network trainer, which runs its step, does not.

The script is one long function: its variables live until the next step assigns them again.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.types import NetworkTrainer
from kohya_ext.sdscripts.families import Family

#: Families whose script casts its inputs to the precision of the model's weights.
_CAST_INPUTS = ("anima",)

#: Families whose script unpacks its captions after it has added the noise to the latents.
_UNPACK_CAPTIONS = ("flux", "lumina")

#: Families whose script weights the mean loss of each image, not the loss of each pixel.
_WEIGHT_MEANS = ("anima", "sd3")


@dataclass
class Variables:
    """Tensors that a script's variables hold."""

    images: torch.Tensor | None = None
    """The images in the VAE's precision; None in scripts that do not keep them."""
    inputs: list[torch.Tensor] = field(default_factory=list)
    """What was assigned before the model ran: latents, captions, noise."""
    prediction: Any = None
    """The model's output, what it should be, timesteps and their weights."""


def input_precision(family: Family, model: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the precision of a model's inputs in a run with ``--mixed_precision`` ``dtype``."""
    precision: torch.dtype = next(model.parameters()).dtype if family.name in _CAST_INPUTS else dtype
    return precision


def assigns_captions_last(family: Family) -> bool:
    """Return whether a script assigns its captions after all other inputs of the model."""
    return family.name in _UNPACK_CAPTIONS


def parameter_groups(family: Family, arguments: Namespace, trained: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the optimizer's groups: one for each trained model, with Anima one for each kind of layer. Some may be frozen."""
    if family.name == "anima" and trained:
        util = importlib.import_module("library.anima_train_utils")
        names = ("self_attn_lr", "cross_attn_lr", "mlp_lr", "mod_lr", "llm_adapter_lr")
        rates = {name: getattr(arguments, name, None) for name in names}
        groups: list[dict[str, Any]] = util.get_anima_param_groups(*trained, arguments.learning_rate, **rates)
        return groups
    return [{"params": list(module.parameters()), "lr": 1e-5} for module in trained]


@contextlib.contextmanager
def as_in_script(
    trainer: NetworkTrainer, family: Family, unet: Any, dtype: torch.dtype, variables: Variables
) -> Iterator[None]:
    """Let a trainer's step cast latents to ``dtype``, and keep the tensors of the script's variables in ``variables``."""
    encode, shift, predict = trainer.encode_images_to_latents, trainer.shift_scale_latents, trainer.get_noise_pred_and_target

    def encode_images(arguments: Namespace, vae: Any, images: torch.Tensor) -> torch.Tensor:
        if family.name in _CAST_INPUTS:
            variables.images = images
        return encode(arguments, vae, images)

    def cast_and_shift(arguments: Namespace, latents: torch.Tensor) -> torch.Tensor:
        return shift(arguments, latents.to(dtype))

    def keep_inputs(*_: Any) -> None:
        values: list[Any] = []
        for frame, _line in traceback.walk_stack(sys._getframe(1)):
            if frame.f_code.co_name in (predict.__name__, "process_batch"):
                values += (value for name, value in frame.f_locals.items() if name != "batch")
            if frame.f_code.co_name == "process_batch":
                break
        variables.inputs = [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]

    def keep_prediction(arguments: Namespace, accelerator: Any, scheduler: Any, latents: Any, batch: Any, captions: Any,
                        *args: Any, **kwargs: Any) -> Any:  # fmt: skip
        with _joined_first(captions) if family.name == "sd3" else contextlib.nullcontext():
            variables.prediction = predict(arguments, accelerator, scheduler, latents, batch, captions, *args, **kwargs)
        prediction, target, timesteps, weights = variables.prediction
        return prediction, target, timesteps, None if family.name in _WEIGHT_MEANS else weights

    with contextlib.ExitStack() as stack:
        replacements = (encode_images, cast_and_shift, keep_prediction)
        for function, replacement in zip((encode, shift, predict), replacements, strict=True):
            stack.enter_context(replaced(trainer, function.__name__, replacement))
        stack.callback(unet.register_forward_pre_hook(keep_inputs).remove)
        yield


@contextlib.contextmanager
def _joined_first(captions: Sequence[Any]) -> Iterator[None]:
    """Join the captions of Stable Diffusion 3 before the noise is drawn, not after."""
    strategy = importlib.import_module("library.strategy_base").TextEncodingStrategy.get_strategy()
    joined = strategy.concat_encodings(*captions[:3])
    with replaced(strategy, "concat_encodings", lambda *_: joined):
        yield
