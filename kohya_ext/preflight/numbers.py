"""Reject numbers that a run would fail on, or that would train in the wrong direction.

Each reason describes how sd-scripts treats a number outside the bounds, in v0.10 and v0.11. Numbers with a meaning are
accepted: ``--learning_rate 0`` with ``--unet_lr``, ``--network_alpha 0`` (the rank), ``--sample_every_n_steps 0``.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.sdscripts import networks

#: The scripts that use ``--clip_skip``.
_SD15 = ("train_network.py", "train_db.py", "fine_tune.py", "train_textual_inversion.py", "train_leco.py")

#: Layers of the text encoder of SD 1.5, and of SD 2, by the value of ``--v2``.
_CLIP_LAYERS = {False: 12, True: 23}


@dataclass(frozen=True)
class Bound:
    """The range of an option's values."""

    minimum: float
    reason: str
    """The effect of a value outside the range."""
    maximum: float = math.inf
    scripts: tuple[str, ...] = ()
    """The scripts that have the bound; empty means all."""
    is_optional: bool = True


_DIVIDES = "sd-scripts divides by it"
_UPHILL = "the loss would be maximized"
_RATE = Bound(0, "optimizers reject a negative learning rate", is_optional=False)
_PROBABILITY = Bound(0, "it is a probability", maximum=1)
_KEEP = Bound(1, "the file that was just saved would be removed")
_KEEP_STATE = Bound(0, "the state that was just saved would be removed")

BOUNDS: Mapping[str, Bound] = {
    "train_batch_size": Bound(1, _DIVIDES),
    "gradient_accumulation_steps": Bound(1, _DIVIDES),
    "save_every_n_steps": Bound(1, _DIVIDES),
    "save_every_n_epochs": Bound(1, _DIVIDES),
    "validate_every_n_steps": Bound(1, _DIVIDES),
    "validate_every_n_epochs": Bound(1, _DIVIDES),
    "save_last_n_epochs": _KEEP,
    "save_last_n_steps": Bound(0, "the file that was just saved would be removed"),
    "save_last_n_epochs_state": _KEEP_STATE,
    "save_last_n_steps_state": _KEEP_STATE,
    "initial_step": Bound(0, "steps are counted from 0"),
    "initial_epoch": Bound(1, "epochs are counted from 1"),
    "max_train_epochs": Bound(1, "nothing would be trained"),
    "max_data_loader_n_workers": Bound(0, "PyTorch's data loader rejects a negative number"),
    "seed": Bound(0, "NumPy requires an unsigned 32-bit seed", maximum=2**32 - 1),
    "learning_rate": _RATE,
    "unet_lr": _RATE,
    "text_encoder_lr": _RATE,
    **dict.fromkeys(("learning_rate_te", "learning_rate_te1", "learning_rate_te2", "learning_rate_te3"), _RATE),
    "lr_warmup_steps": Bound(0, "a warmup cannot be negative"),
    "max_grad_norm": Bound(0, _UPHILL),
    "min_snr_gamma": Bound(0, _UPHILL),
    "scale_weight_norms": Bound(0, "the weights would become NaN"),
    "network_dropout": _PROBABILITY,
    "caption_dropout_rate": _PROBABILITY,
    "caption_tag_dropout_rate": _PROBABILITY,
    "clip_skip": Bound(1, "the text encoder's input would be used as its output", scripts=_SD15),
    "min_timestep": Bound(0, "timesteps range from 0 to 1000", maximum=1000),
    "max_timestep": Bound(0, "timesteps range from 0 to 1000", maximum=1000),
    "bucket_reso_steps": Bound(1, _DIVIDES),
    "min_bucket_reso": Bound(1, "an image has at least one pixel"),
}

#: Option name in a dataset config -> command-line name, where they differ.
_IN_DATASETS = {"batch_size": "train_batch_size"}


def problems(script: Path, args: Namespace) -> Iterator[str]:
    """Yield one message per invalid number among a script's arguments."""
    yield from _outside(script, vars(args), "--")
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value) and name not in BOUNDS:
            yield f"--{name} {value:g} is not a number to train with; correct or remove it"
    yield from _ranks(args)
    yield from _starts(args)
    layers, skipped = _CLIP_LAYERS[bool(getattr(args, "v2", False))], getattr(args, "clip_skip", None) or 0
    if script.name in _SD15 and skipped > layers:
        yield f"--clip_skip {skipped}: the text encoder has {layers} layers; use a number from 1 to {layers}, or remove it"
    first, last = (getattr(args, name, None) for name in ("min_timestep", "max_timestep"))
    if first is not None and last is not None and first > last:
        yield f"--min_timestep {first} is above --max_timestep {last}, so each step would train timestep {last}; swap them"
    if _workers(args) == 0 and getattr(args, "persistent_data_loader_workers", False):
        yield ("--persistent_data_loader_workers has no workers to keep alive; use --max_data_loader_n_workers 1 or more")


def problems_in_subset(script: Path, subset: Mapping[str, Any]) -> Iterator[str]:
    """Yield one message per invalid number among the options of a subset in a dataset config."""
    yield from _outside(script, {_IN_DATASETS.get(key, key): value for key, value in subset.items()}, "")


def _workers(args: Namespace) -> int | None:
    """Return the number of data-loader workers. With DeepSpeed, sd-scripts always uses one."""
    workers: int | None = getattr(args, "max_data_loader_n_workers", None)
    return 1 if getattr(args, "deepspeed", False) else workers


def _outside(script: Path, values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, bound in BOUNDS.items():
        value = values.get(name)
        if bound.scripts and script.name not in bound.scripts:
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(number, (int, float)) or bound.minimum <= number <= bound.maximum:
                continue
            allowed = f"{bound.minimum:g} or more"
            if bound.maximum < math.inf:
                allowed = f"a number from {bound.minimum:g} to {bound.maximum:.10g}"
            removable = ", or remove it" if bound.is_optional else ""
            yield f"{prefix}{name} {number:g}: {bound.reason}; use {allowed}{removable}"


def _starts(args: Namespace) -> Iterator[str]:
    """Yield a message if a LoRA script would begin after its last step, which ends it with an AssertionError."""
    step, epoch = (getattr(args, f"initial_{unit}", None) for unit in ("step", "epoch"))
    steps, epochs = (getattr(args, f"max_train_{unit}", None) for unit in ("steps", "epochs"))
    if step is not None:  # it replaces the epoch, as --max_train_epochs replaces the steps
        if epochs is None and steps is not None and 0 < steps <= step:
            yield f"--initial_step {step} leaves nothing to train of --max_train_steps {steps}; change one of them"
    elif epoch is not None and epochs is not None and epoch > max(epochs, 1):
        yield f"--initial_epoch {epoch} leaves nothing to train of --max_train_epochs {epochs}; change one of them"


def _ranks(args: Namespace) -> Iterator[str]:
    rank = getattr(args, "network_dim", None)
    module = getattr(args, "network_module", None) or ""
    arguments = getattr(args, "network_args", None) or ()
    if rank is None or getattr(args, "dim_from_weights", False):
        return
    known = networks.dimension(module, arguments)
    if known is not None and rank < known.minimum and networks.meaning_of_dim(module, arguments) == known.meaning:
        yield (
            f"--network_dim {rank} is {known.meaning} with {module}, and a block of fewer than {known.minimum} channels has "
            f"nothing to train; use {known.minimum} or more, usually {known.default}"
        )
        return
    if rank > 0:
        return
    others = any("dim" in str(pair).partition("=")[0] for pair in arguments)
    if rank < 0 or (module.startswith("networks.") and not others):
        yield f"--network_dim {rank}: a network of that rank has nothing to train; use 1 or more, usually 4 to 128"
