"""Skip gradients of model inputs and of untrained token embeddings.

Reentrant checkpointing loses gradients if no input of a block requires grad, so the LoRA scripts set requires_grad on latents,
text embeddings, FLUX's guidance and the token embeddings. With nonreentrant_checkpointing this is not needed, but the gradients
are still computed through every layer that text or guidance enters. They cost 1.6% of an SDXL LoRA's FLOPs at 1024 and
0.15 GB (``estimate --fresh``, with and without ``--disable_patch skip_unused_gradients``). The gradients of the token
embeddings have the size of the whole vocabulary, belong to no optimizer and are never freed.

The patch changes nothing where checkpointing still loses gradients: if nonreentrant_checkpointing is off, and in Anima, whose
offloading checkpoint is reentrant.
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
from kohya_ext.patching.checkpointed_blocks import reentrant_loses_gradients
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, trained_weights
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.families import FAMILIES

#: Families whose offloading checkpoint is reentrant and loses gradients if no input of a block requires grad.
REENTRANT = ("anima",)


@dataclass
class _SkippedGradients(TrainingCallback):
    """The tensors whose gradients a run skips."""

    tensors: Counter[str] = field(default_factory=Counter)
    """Number of tensors by kind that required a gradient without need."""
    frozen: bool = False
    """Whether untrained embeddings are frozen already."""

    def before_batch(self, accelerator: Accelerator) -> None:
        """Before the first step, freeze the embeddings that are in no optimizer."""
        if not self.frozen:
            self.frozen = True
            for weight in _untrained_embeddings(accelerator):
                self.tensors["embeddings"] += 1
                weight.requires_grad_(False)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _SkippedGradients:
    return _SkippedGradients()


def _facts() -> Mapping[str, object]:
    skipped = current(_SkippedGradients)
    return dict(skipped.tensors) if skipped is not None else {}


def _detach_inputs(original: Any, settings: Settings) -> Any:
    module = sys.modules[original.__module__]

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(module, "USE_REENTRANT", False) and reentrant_loses_gradients():
            return original(self, *args, **kwargs)
        return original(self, *map(_detached, args), **{name: _detached(value) for name, value in kwargs.items()})

    return forward


def _detached(value: Any) -> Any:
    """Detach a tensor, unless it was computed from parameters, as by a trained text encoder."""
    import torch

    if isinstance(value, torch.Tensor) and value.requires_grad and not _depends_on_parameters(value):
        if (skipped := current(_SkippedGradients)) is not None:
            skipped.tensors["inputs"] += 1
        return value.detach()
    return value


def _depends_on_parameters(tensor: Any) -> bool:
    """Return whether the autograd graph of a tensor contains parameters."""
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


def _untrained_embeddings(accelerator: Accelerator) -> Iterator[Any]:
    """Yield the embeddings' weights that require a gradient and are in no optimizer."""
    # DistributedDataParallel waits for gradients of all weights that required them at its construction.
    if str(accelerator.distributed_type).rpartition(".")[2] != "NO":
        return
    trained = {id(weight) for weight in trained_weights(accelerator._optimizers)}
    if not trained:  # an optimizer whose weights are unknown
        return
    for model in accelerator._models:
        for weight in _embeddings(accelerator.unwrap_model(model)):
            if weight.requires_grad and id(weight) not in trained:
                yield weight


def _embeddings(model: Any) -> Iterator[Any]:
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


PATCH = Patch(
    name="skip_unused_gradients",
    summary="skip gradients of latents, text embeddings, guidance and untrained token embeddings",
    targets=(
        *(
            Target(family.module, f"{family.model}.forward", _detach_inputs, takes("self", family.first_input), body="runs")
            for family in FAMILIES
            if family.name not in REENTRANT
        ),
    ),
    exactness="exact",
    held_to="the weights trained without the patch, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/issues/323",
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
