"""Numbers that a run would fail on, or that would train in the wrong direction.

Each reason is what sd-scripts does with a number beyond the bound, in both generations. A number that it takes in a meaningful
way is let through: ``--learning_rate 0`` with ``--unet_lr``, ``--network_alpha 0`` (the rank), ``--sample_every_n_steps 0``.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The scripts that hand ``--clip_skip`` to the text encoder.
_SD15 = ("train_network.py", "train_db.py", "fine_tune.py", "train_textual_inversion.py")


@dataclass(frozen=True)
class Bound:
    """The range that an option must be in."""

    least: float
    reason: str
    """What happens outside of it."""
    most: float = math.inf
    scripts: tuple[str, ...] = ()
    """The scripts that it holds for; all of them if empty."""
    can_be_left_out: bool = True


_DIVIDES = "sd-scripts divides by it"
_UPHILL = "the loss would be maximized"
_RATE = Bound(0, "optimizers take no negative learning rate", can_be_left_out=False)
_SHARE = Bound(0, "it is a probability", most=1)
_KEPT = Bound(1, "the file that was just saved would be removed")
_KEPT_STATE = Bound(0, "the state that was just saved would be removed")

BOUNDS: Mapping[str, Bound] = {
    "train_batch_size": Bound(1, _DIVIDES),
    "gradient_accumulation_steps": Bound(1, _DIVIDES),
    "save_every_n_steps": Bound(1, _DIVIDES),
    "save_every_n_epochs": Bound(1, _DIVIDES),
    "save_last_n_epochs": _KEPT,
    "save_last_n_steps": Bound(0, "the file that was just saved would be removed"),
    "save_last_n_epochs_state": _KEPT_STATE,
    "save_last_n_steps_state": _KEPT_STATE,
    "max_train_epochs": Bound(1, "nothing would be trained"),
    "max_data_loader_n_workers": Bound(0, "PyTorch's data loader takes no negative number"),
    "seed": Bound(0, "NumPy takes no other seed", most=2**32 - 1),
    "learning_rate": _RATE,
    "unet_lr": _RATE,
    "text_encoder_lr": _RATE,
    **dict.fromkeys(("learning_rate_te", "learning_rate_te1", "learning_rate_te2", "learning_rate_te3"), _RATE),
    "lr_warmup_steps": Bound(0, "a warmup has no negative length"),
    "max_grad_norm": Bound(0, _UPHILL),
    "min_snr_gamma": Bound(0, _UPHILL),
    "scale_weight_norms": Bound(0, "the weights would become NaN"),
    "network_dropout": _SHARE,
    "caption_dropout_rate": _SHARE,
    "caption_tag_dropout_rate": _SHARE,
    "clip_skip": Bound(1, "the text encoder's input would be taken for its output", scripts=_SD15),
    "min_timestep": Bound(0, "there are timesteps 0 to 1000", most=1000),
    "max_timestep": Bound(0, "there are timesteps 0 to 1000", most=1000),
    "bucket_reso_steps": Bound(1, _DIVIDES),
    "min_bucket_reso": Bound(1, "an image has at least one pixel"),
}

#: What a dataset config calls an option.
_IN_DATASETS = {"batch_size": "train_batch_size"}


def problems(script: Path, args: Namespace) -> Iterator[str]:
    """Yield what is wrong with the numbers among a script's arguments."""
    yield from _outside(script, vars(args), "--")
    yield from _ranks(args)
    if _workers(args) == 0 and getattr(args, "persistent_data_loader_workers", False):
        yield (
            "--persistent_data_loader_workers needs --max_data_loader_n_workers of 1 or more: PyTorch's data loader keeps no "
            "workers alive when there are none"
        )


def problems_in_subset(script: Path, subset: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the numbers of one subset of a dataset config."""
    yield from _outside(script, {_IN_DATASETS.get(key, key): value for key, value in subset.items()}, "")


def _workers(args: Namespace) -> int | None:
    """Return how many data-loader workers the run has; DeepSpeed's path in sd-scripts always has one."""
    workers: int | None = getattr(args, "max_data_loader_n_workers", None)
    return 1 if getattr(args, "deepspeed", False) else workers


def _outside(script: Path, values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, bound in BOUNDS.items():
        value = values.get(name)
        if bound.scripts and script.name not in bound.scripts:
            continue
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(number, (int, float)) or bound.least <= number <= bound.most:
                continue
            wanted = (
                f"{bound.least:g} or more" if bound.most == math.inf else f"a number from {bound.least:g} to {bound.most:.10g}"
            )
            instead = ", or leave it out" if bound.can_be_left_out else ""
            yield f"{prefix}{name} {number:g}: {bound.reason}. Give {wanted}{instead}"


def _ranks(args: Namespace) -> Iterator[str]:
    rank = getattr(args, "network_dim", None)
    if rank is None or rank > 0 or getattr(args, "dim_from_weights", False):
        return
    module = getattr(args, "network_module", None) or ""
    others = any("dim" in str(pair).partition("=")[0] for pair in getattr(args, "network_args", None) or ())
    if rank < 0 or (module.startswith("networks.") and not others):
        yield f"--network_dim {rank}: a network of that rank has nothing to train. Give 1 or more, usually 4 to 128"
