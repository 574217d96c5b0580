"""Recompute DyLoRA with the ranks of the forward pass under gradient checkpointing.

Every call of a DyLoRA module draws the rank to train from Python's random numbers and clears ``requires_grad`` on the others.
Checkpointing restores torch's random state before it recomputes, but not Python's, so the recomputation draws another rank.
Autograd then silently drops the gradients of parameters whose ``requires_grad`` is off. Rank 4 in units of 1 loses three
quarters of its training. LyCORIS's DyLoRA slices its weights to the rank instead, so another rank raises an error.
"""

from __future__ import annotations

import random
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes


def _keep_ranks(original: Any, settings: Settings) -> Any:
    import torch

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # outside backward, so not a recomputation
            self._kohya_ext_random_state = random.getstate()
            return original(self, *args, **kwargs)
        current = random.getstate()
        random.setstate(self._kohya_ext_random_state)
        try:
            return original(self, *args, **kwargs)
        finally:
            random.setstate(current)

    return forward


PATCH = Patch(
    name="dylora_ranks",
    summary="recompute DyLoRA with the ranks of the forward pass under gradient checkpointing, so that no gradients are lost",
    targets=(
        Target("networks.dylora", "DyLoRAModule.forward", _keep_ranks, takes("self", "x", exactly=True), body="runs"),
        Target("lycoris.modules.dylora", "DyLoraModule.forward", _keep_ranks, takes("self", "x"), optional=True, body="runs"),
    ),
    exactness="exact",
    held_to="training without gradient checkpointing, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/networks/dylora.py",
)
