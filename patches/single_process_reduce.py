"""Skip averaging gradients over processes in a run with one process.

The LoRA scripts average every gradient between backward and the optimizer step, even with a single process. accelerate then
reads several environment variables per gradient and copies it. For SDXL's 1,444 LoRA weights this adds 1,444 small kernels
and a second set of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_skipped_copies = 0
"""Number of gradients returned without a copy."""


def _facts() -> Mapping[str, object]:
    return {"gradients_not_copied": _skipped_copies}


def _skip_copy(original: Any, settings: Settings) -> Any:
    import torch

    @wraps(original)
    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        global _skipped_copies
        if isinstance(tensor, torch.Tensor) and scale == 1.0 and self.num_processes == 1:
            _skipped_copies += 1
            return tensor
        return original(self, tensor, reduction, scale)

    return reduce


PATCH = Patch(
    name="single_process_reduce",
    summary="skip copying gradients to average them over a single process",
    targets=(
        Target(
            "accelerate.accelerator",
            "Accelerator.reduce",
            _skip_copy,
            takes("self", "tensor", "reduction", "scale", exactly=True),
            body=known_bodies(
                {"0c8ed3a35f73": "1.6 to 1.15"},
                helpers={"reduce": {"40d5917e1d8c": "1.6 to 1.13", "03e71c62759e": "1.14 to 1.15"}},
                package="accelerate",
            ),
        ),
    ),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/operations.py",
    facts=_facts,
)
