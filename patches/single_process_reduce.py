"""On one process, the mean of a gradient over all processes is the gradient.

The LoRA scripts average every gradient between backward and the optimizer's step, also when there is nobody to average with.
accelerate then reads several environment variables for each of them and copies it: for SDXL's 1,444 LoRA weights as many small
kernels, and a second set of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_uncopied = 0
"""Gradients that were handed back as they are."""


def _facts() -> Mapping[str, object]:
    return {"gradients_not_copied": _uncopied}


def _at_once(original: Any, settings: Settings) -> Any:
    import torch

    @wraps(original)
    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        global _uncopied
        if isinstance(tensor, torch.Tensor) and scale == 1.0 and self.num_processes == 1:
            _uncopied += 1
            return tensor
        return original(self, tensor, reduction, scale)

    return reduce


PATCH = Patch(
    name="single_process_reduce",
    summary="gradients are not copied to be averaged over one process",
    targets=(
        Target(
            "accelerate.accelerator",
            "Accelerator.reduce",
            _at_once,
            takes("self", "tensor", "reduction", "scale", exactly=True),
            body=known_bodies(
                "0c8ed3a35f73",
                helpers={"reduce": ("40d5917e1d8c", "03e71c62759e")},  # up to 1.13, and from 1.14 on
                releases="accelerate 1.6 to 1.15",
            ),
        ),
    ),
    exactness="exact",
    held_to="the same run without it",
    idea="https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/operations.py",
    facts=_facts,
)
