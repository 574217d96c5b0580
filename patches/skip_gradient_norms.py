"""Skip the gradient norms of the LoRA modules of FLUX, Chroma and HunyuanImage in runs that do not read them.

``networks.lora_flux`` estimates the gradient of each full weight matrix before every optimizer step, for these families:
two products of the layer's size for each module, their sum, a scaled copy and its norm. With modules at all linear layers of
FLUX's blocks this moves 190 GB per step, 16 bytes for each of 11.8e9 weights. On an H100 these kernels took 71 of the 908 ms
that a step kept the GPU busy (benchmarks/results/gpu_time.json). Only GGPO (``--network_args ggpo_beta=... ggpo_sigma=...``)
and the trackers of ``--log_with`` read the norms.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.fingerprints import known_bodies

_accelerator: Accelerator | None = None
"""The run's; None in an estimate, which has no trackers."""

_skipped_steps = 0


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
    global _accelerator
    _accelerator = accelerator


def _facts() -> Mapping[str, object]:
    return {"steps": _skipped_steps}


def _skip_unread(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def update_grad_norms(self: Any) -> None:
        global _skipped_steps
        is_tracked = _accelerator is not None and bool(_accelerator.trackers)
        if is_tracked or any(module.ggpo_beta is not None for module in self.text_encoder_loras + self.unet_loras):
            original(self)
            return
        _skipped_steps += 1

    return update_grad_norms


PATCH = Patch(
    name="skip_gradient_norms",
    summary="skip gradient norms of LoRA modules for FLUX, Chroma and HunyuanImage that nothing reads",
    targets=(
        Target(
            "networks.lora_flux",
            "LoRANetwork.update_grad_norms",
            _skip_unread,
            takes("self", exactly=True),
            body=known_bodies(
                {"3209e543e865": "since 2025-04"},
                helpers={
                    "LoRAModule.update_grad_norms": {"f7efef559a62": "since 2025-04"},
                    "LoRAModule.forward": {
                        "2b146c75c4ac": "2025-04 to v0.10.1",
                        "94c4903a7393": "since v0.10.4",
                    },  # reads the norms for GGPO
                    "LoRANetwork.grad_norms": {"df31b9abd929": "since 2025-06-05"},  # reads them for the trackers
                },
            ),
        ),
    ),
    exactness="exact",
    held_to="the weights trained without the patch, and upstream's values in trackers, bit-identical",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/networks/lora_flux.py",
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
