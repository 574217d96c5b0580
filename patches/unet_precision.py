"""Load SDXL's U-Net for a LoRA in the precision of its file, without copies in float32.

accelerate casts each tensor of a 16-bit checkpoint to the float32 of the empty model: 10.3 GB for the U-Net, on the host or,
with --lowram, on the GPU. The script casts all of it to the training's precision before it computes with it. A cast from 16
bits to float32 is exact, so the second cast gives the same weights from the file's own. Its tensors stay in the mapped file
until then.

Merged base weights, and networks that read the layers' weights when they are created, need float32 and keep upstream's copies.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.families import BY_NAME

_SDXL = BY_NAME["sdxl"]


@dataclass
class _Loading(TrainingCallback):
    """A run that casts the U-Net after it has loaded it."""

    dtype: str = ""
    """The precision of the file; empty if the U-Net was loaded by upstream."""


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Loading | None:
    is_cast = program().command.name == _SDXL.lora and getattr(args, "network_module", None) in _SDXL.networks
    return _Loading() if is_cast and not getattr(args, "base_weights", None) else None


def _load(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_state_dict_on_device(model: Any, state_dict: Any, device: Any, dtype: Any = None) -> Any:
        import torch

        loading = current(_Loading)
        if loading is not None and dtype is None and type(model).__name__ == _SDXL.model:
            kinds = {tensor.dtype for tensor in state_dict.values()}
            if len(kinds) == 1 and kinds <= {torch.float16, torch.bfloat16}:
                (dtype,) = kinds
                loading.dtype = str(dtype)
        return original(model, state_dict, device, dtype)

    return load_state_dict_on_device


def _facts() -> Mapping[str, object]:
    loading = current(_Loading)
    return {"dtype": loading.dtype} if loading is not None else {}


PATCH = Patch(
    name="unet_precision",
    summary="load SDXL's U-Net for a LoRA in the precision of its file, without copies in float32",
    targets=(
        Target(
            "library.sdxl_model_util",
            "_load_state_dict_on_device",
            _load,
            takes("model", "state_dict", "device", "dtype", exactly=True),
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="training without it, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/sdxl_model_util.py",
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
