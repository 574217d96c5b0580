"""No gradients for what nobody trains: the model's inputs, and the embeddings of text encoders.

Reentrant checkpointing loses gradients when nothing that enters a block requires grad, so the LoRA scripts make latents, text
embeddings, FLUX's guidance and the token embeddings require it. The non-reentrant kind needs none of that. The gradients are
computed all the same, through every layer that text or guidance enters: 1.6 % of an SDXL LoRA's FLOPs at 1024, and 0.15 GB
(``estimate --fresh``, with and without ``--disable_patch skip_unused_gradients``). The gradients of the token embeddings, as
large as the whole vocabulary, are in no optimizer and never freed.

Where checkpointing is still reentrant (nonreentrant_checkpointing is off), this leaves everything as it is. So it does with
Anima, whose offloading checkpoint is of the reentrant kind.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights
from kohya_ext.sdscripts.families import FAMILIES

#: Families with an offloading checkpoint that is reentrant: it loses gradients when nothing that enters a block requires grad.
REENTRANT = ("anima",)


@dataclass
class _Spared(TrainingCallback):
    """What needs no gradient in one run."""

    tensors: Counter[str] = field(default_factory=Counter)
    """Tensors that were asked for a gradient and need none."""
    frozen: bool = False
    """Whether the embeddings were looked at."""

    def before_batch(self, accelerator: Any) -> None:
        """Before the first step: freeze the embeddings that are in no optimizer."""
        if not self.frozen:
            self.frozen = True
            for weight in _untrained_embeddings(accelerator):
                self.tensors["embeddings"] += 1
                weight.requires_grad_(False)


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Spared:
    return _Spared()


def _facts() -> Mapping[str, object]:
    spared = current(_Spared)
    return dict(spared.tensors) if spared is not None else {}


def _cut_off(original: Any, settings: Settings) -> Any:
    module = sys.modules[original.__module__]

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, "USE_REENTRANT", False):
            return original(self, *args, **kwargs)
        return original(self, *map(_without_history, args), **{name: _without_history(value) for name, value in kwargs.items()})

    return forward


def _without_history(value: Any) -> Any:
    """The tensor, cut off from what made it unless that has weights: an encoder that is trained."""
    import torch

    if isinstance(value, torch.Tensor) and value.requires_grad and not _leads_to_weights(value):
        if (spared := current(_Spared)) is not None:
            spared.tensors["inputs"] += 1
        return value.detach()
    return value


def _leads_to_weights(tensor: Any) -> bool:
    import torch

    if tensor.grad_fn is None:
        return isinstance(tensor, torch.nn.Parameter)
    nodes: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter):
            return True
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        nodes += new
    return False


# --- embeddings ------------------------------------------------------------------------------------------------------


def _untrained_embeddings(accelerator: Any) -> Iterator[Any]:
    """Yield the embeddings' weights that require a gradient and are in no optimizer."""
    # DistributedDataParallel waits for a gradient of every weight that required one when it was made.
    if str(accelerator.distributed_type).rpartition(".")[2] != "NO":
        return
    trained = {id(weight) for weight in trained_weights(accelerator._optimizers)}
    if not trained:  # the optimizer is somebody else's
        return
    for model in accelerator._models:
        for weight in _embeddings(accelerator.unwrap_model(model)):
            if weight.requires_grad and id(weight) not in trained:
                yield weight


def _embeddings(model: Any) -> Iterator[Any]:
    """The weights of all embeddings of a model of transformers', unless its checkpointing is of the reentrant kind."""
    import torch

    parts = list(model.modules())
    kinds = [part._gradient_checkpointing_func for part in parts if hasattr(part, "_gradient_checkpointing_func")]
    if kinds and all(getattr(kind, "keywords", {}).get("use_reentrant") is False for kind in kinds):
        for part in parts:
            if isinstance(part, torch.nn.Embedding):
                yield part.weight


PATCH = Patch(
    name="skip_unused_gradients",
    summary="no gradients for latents, text embeddings, guidance and token embeddings that nobody trains",
    targets=(
        *(
            Target(family.module, f"{family.model}.forward", _cut_off, takes("self", family.first_input), body="runs")
            for family in FAMILIES
            if family.name not in REENTRANT
        ),
    ),
    exactness="exact",
    held_to="the weights that are trained with it off, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/issues/323",
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
