"""Let gradient checkpointing recompute DyLoRA with the ranks that it drew.

Every call of a DyLoRA module draws, with Python's random numbers, the rank that it trains this time, and switches
``requires_grad`` off for the others. Checkpointing restores torch's random numbers before it recomputes, not Python's: the
recompute draws another rank. Where that is not the forward's by luck, autograd finds ``requires_grad`` off at the weights
that have a gradient, and drops it without a word: rank 4 in units of 1 loses three quarters of its training. LyCORIS's DyLoRA
cuts its weights to the rank instead, and a recompute with another one is an error.
"""

from __future__ import annotations

import random
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes


def _drawn_once(original: Any, settings: Settings) -> Any:
    import torch

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside a backward pass, so not a recompute
            self._kohya_ext_drew_from = random.getstate()
            return original(self, *args, **kwargs)
        now = random.getstate()
        random.setstate(self._kohya_ext_drew_from)
        try:
            return original(self, *args, **kwargs)
        finally:
            random.setstate(now)

    return forward


PATCH = Patch(
    name="dylora_ranks",
    summary="gradient checkpointing recomputes DyLoRA with the ranks that were drawn, and loses no gradients",
    targets=(
        Target("networks.dylora", "DyLoRAModule.forward", _drawn_once, takes("self", "x", exactly=True), body="runs"),
        Target("lycoris.modules.dylora", "DyLoraModule.forward", _drawn_once, takes("self", "x"), optional=True, body="runs"),
    ),
    exactness="exact",
    held_to="training without gradient checkpointing, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/networks/dylora.py",
)
