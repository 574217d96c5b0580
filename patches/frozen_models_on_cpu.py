"""Train networks (LoRA) with several processes on CPUs.

accelerate wraps every prepared model in DistributedDataParallel on CPUs, and on GPUs only a model with trainable parameters.
The network scripts prepare the frozen U-Net or transformer, which DistributedDataParallel rejects. So upstream's LoRA scripts
run with several processes on GPUs only.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes


def _prepare_model(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        on_cpus = str(self.distributed_type).endswith("MULTI_CPU")
        if on_cpus and not args and not any(weight.requires_grad for weight in model.parameters()):
            kwargs["evaluation_mode"] = True
        return original(self, model, *args, **kwargs)

    return prepare_model


PATCH = Patch(
    name="frozen_models_on_cpu",
    summary="train networks with several processes on CPUs, where accelerate rejects the frozen model",
    targets=(
        Target(
            "accelerate.accelerator",
            "Accelerator.prepare_model",
            _prepare_model,
            takes("self", "model", "device_placement", "evaluation_mode"),
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="upstream with accelerate's condition for GPUs, which does not wrap a frozen model either",
    idea="https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py",
)
