"""Reject what cannot work with ``--deepspeed``, or would train something other than requested.

DeepSpeed gives the optimizer flat parts of the weights, one part for each process, and ZeRO-3 divides the weights themselves.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from kohya_ext.preflight import given
from kohya_ext.sdscripts.constraints import FUSED_OPTIMIZERS

#: Optimizers whose step is computed from each element alone, or from blocks of elements, so that it can be divided. Names in
#: lower case, without their module.
_DIVISIBLE = (
    *("", "adam", "adamw", "adamax", "nadam", "radam", "adagrad", "rmsprop", "sgd", "sgdnesterov", "lion", "adamw8bit"),
    *("lion8bit", "sgdnesterov8bit", "pagedadamw", "pagedadamw8bit", "pagedadamw32bit", "pagedlion8bit"),
)

#: Parts of the names of optimizers whose kernels need a GPU.
_ON_GPUS = ("8bit", "paged")

#: Scripts that add DeepSpeed's options, and give accelerate models and optimizer in calls that DeepSpeed does not support.
_UNSUPPORTED = (
    "train_control_net.py",
    "train_controlnet.py",
    "sdxl_train_control_net.py",
    "control_net_lllite",
    "textual_inversion",
)

_SAMPLES = ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")


def optimizer_of(args: Namespace) -> str:
    """Return the name of the optimizer that sd-scripts creates; empty for its default, AdamW."""
    older = {"AdamW8bit": "use_8bit_adam", "Lion": "use_lion_optimizer"}
    return getattr(args, "optimizer_type", None) or next((name for name in older if any(given(args, older[name]))), "")


def problems(script: Path, args: Namespace) -> Iterator[str]:
    """Yield one message per reason why a run cannot use DeepSpeed; none without ``--deepspeed``."""
    if not getattr(args, "deepspeed", False):
        return
    if importlib.util.find_spec("deepspeed") is None:
        yield "--deepspeed needs the package deepspeed, which is not installed: pip install deepspeed ninja"
    yield from conflicts(script, args)


def conflicts(script: Path, args: Namespace) -> Iterator[str]:
    """Yield one message per reason why a run could not use DeepSpeed if it were installed; none without ``--deepspeed``."""
    if not getattr(args, "deepspeed", False):
        return
    if any(script.name == name or (not name.endswith(".py") and name in script.name) for name in _UNSUPPORTED):
        yield f"{script.name} does not support --deepspeed; remove it"
    for option in given(args, *FUSED_OPTIMIZERS):
        yield f"--deepspeed and --{option} cannot be combined: DeepSpeed steps its own optimizer; remove one of the two"
    for option in given(args, "blocks_to_swap"):
        yield (
            f"--deepspeed and --{option} cannot be combined: DeepSpeed holds the blocks' weights; use --zero_stage 3 and "
            "--offload_param_device cpu instead"
        )
    for option in given(args, "fp8_base", "fp8_base_unet"):
        yield f"--deepspeed and --{option} cannot be combined: DeepSpeed casts all weights to the type of --mixed_precision"
    stage, offloads = getattr(args, "zero_stage", 2), getattr(args, "offload_optimizer_device", None) is not None
    yield from _of_the_optimizer(optimizer_of(args), stage, offloads)
    yield from _of_the_stage(args, stage, offloads)


def _of_the_optimizer(name: str, stage: int, offloads: bool) -> Iterator[str]:
    kind = name.rpartition(".")[2].lower()
    if stage > 0 and kind not in _DIVISIBLE:
        yield (
            f"--optimizer_type {name} and --zero_stage {stage} cannot be combined: its step depends on whole "
            "weights, and DeepSpeed gives it parts of them; use AdamW"
        )
    elif offloads and any(part in kind for part in _ON_GPUS):
        yield f"--optimizer_type {name} and --offload_optimizer_device cannot be combined: it needs a GPU; use AdamW"


def _of_the_stage(args: Namespace, stage: int, offloads: bool) -> Iterator[str]:
    if offloads and stage < 2:
        yield f"--offload_optimizer_device needs --zero_stage 2 or 3, not {stage}"
    if stage < 3:
        for option in given(args, "offload_param_device"):
            yield f"--{option} needs --zero_stage 3, not {stage}"
        return
    for option in given(args, *_SAMPLES):
        yield (
            f"--zero_stage 3 and --{option} cannot be combined: the processes would wait for each other's weights; "
            "sample from saved models, or use --zero_stage 2"
        )
    for option in given(args, "scale_weight_norms"):
        yield f"--zero_stage 3 and --{option} cannot be combined: no process has whole weights; use --zero_stage 2"
