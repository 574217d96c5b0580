"""Presets as TOML files that the window of LoRA_Easy_Training_Scripts loads.

Loading replaces the whole form: what the file lacks gets the window's default. So a preset is written into a file that the
user has saved there, and the user's other entries stay. A run keeps all that the form shows. The form's "Extra Args" name the
preset, for the options that the form lacks.

Source: ``load_args`` and ``load_dataset_args`` in main_ui_files of
https://github.com/derrian-distro/LoRA_Easy_Training_Scripts, ae5ce07.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from kohya_ext.errors import UserError

_GENERAL, _NETWORK, _OPTIMIZER = ("general_args", "args"), ("network_args", "args"), ("optimizer_args", "args")
_DATA, _BUCKETS, _FLUX, _EXTRA = (
    ("general_args", "dataset_args"),
    ("bucket_args", "dataset_args"),
    ("flux_args", "args"),
    ("extra_args", "args"),
)

#: Option -> the table of its field. Only ``train_batch_size`` has another name there.
_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("resolution", "train_batch_size"), _DATA),
        **dict.fromkeys(("enable_bucket", "max_bucket_reso"), _BUCKETS),
        **dict.fromkeys(("cache_latents", "fp8_base", "full_bf16", "full_fp16", "gradient_accumulation_steps"), _GENERAL),
        **dict.fromkeys(("gradient_checkpointing", "mixed_precision", "no_half_vae", "sdpa"), _GENERAL),
        **dict.fromkeys(("cache_text_encoder_outputs", "network_alpha", "network_dim", "network_train_unet_only"), _NETWORK),
        **dict.fromkeys(("learning_rate", "lr_scheduler", "max_grad_norm", "min_snr_gamma"), _OPTIMIZER),
        **dict.fromkeys(("optimizer_args", "optimizer_type"), _OPTIMIZER),
        **dict.fromkeys(("apply_t5_attn_mask", "blocks_to_swap", "discrete_flow_shift"), _FLUX),
        **dict.fromkeys(("guidance_scale", "model_prediction_type", "timestep_sampling"), _FLUX),
    }
)

#: Fields that keep the user's entry if the preset leaves them out. The others are then removed, so that they have
#: their defaults.
_KEPT = frozenset(
    {
        *("discrete_flow_shift", "enable_bucket", "guidance_scale", "learning_rate", "max_bucket_reso", "mixed_precision"),
        *("model_prediction_type", "network_alpha", "network_dim", "no_half_vae", "resolution", "timestep_sampling"),
    }
)
_DEFAULTS: Mapping[tuple[str, str], Mapping[str, object]] = {
    _OPTIMIZER: {"lr_scheduler": "constant"},
    _GENERAL: {"clip_skip": 1, "max_token_length": 75},
}
"""sd-scripts' own values where the window has others, for fields without an entry."""

#: Fields that would replace a preset's network, rates or schedule, or add to its memory.
_REMOVED: Mapping[tuple[str, str], Sequence[str]] = MappingProxyType(
    {
        _GENERAL: ("sdxl", "v2", "xformers"),
        _NETWORK: (
            *("cache_text_encoder_outputs_to_disk", "dim_from_weights", "fa", "network_args"),
            "network_train_text_encoder_only",
        ),
        _OPTIMIZER: (
            *("lr_scheduler_args", "lr_scheduler_num_cycles", "lr_scheduler_power", "lr_scheduler_type", "text_encoder_lr"),
            *("unet_lr", "warmup_ratio"),
        ),
        _FLUX: ("split_mode",),
    }
)

#: The window's choices of an optimizer whose names are sd-scripts' own.
_OPTIMIZERS = (
    *("AdaFactor", "AdamW", "AdamW8bit", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptSGD", "Lion", "Prodigy"),
    *("RAdamScheduleFree", "SGDNesterov", "SGDNesterov8bit"),
)

#: The families whose LoRAs the program trains.
FAMILIES = ("sd15", "sdxl", "flux")

#: Options of which the form has another, in epochs or shares.
INEXPRESSIBLE = ("lr_warmup_steps",)


def form(values: Mapping[str, object], family: str, presets: Sequence[str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's content for a preset's ``values`` of a family's LoRA, with the other entries of a ``saved`` file."""
    document: dict[str, Any] = copy.deepcopy(dict(saved))
    if family != "flux":
        document.pop("flux_args", None)  # its presence selects FLUX
    for (section, part), names in _REMOVED.items():
        for name in names:
            document.get(section, {}).get(part, {}).pop(name, None)
    for option, table in _FIELDS.items():
        if family == "flux" or table != _FLUX:
            _set(document, table, option, values.get(option))
    for table, defaults in _DEFAULTS.items():
        for name, value in defaults.items():
            _table(document, table).setdefault(name, value)
    if family == "sdxl":
        _table(document, _GENERAL)["sdxl"] = True
    extra = _table(document, _EXTRA)
    extra["preset"] = ",".join(presets)
    optimizer = str(values.get("optimizer_type", "AdamW"))
    _table(document, _OPTIMIZER)["optimizer_type"] = known = _choice(optimizer)
    extra.pop("optimizer_type", None)
    if known.lower() != optimizer.lower():
        extra["optimizer_type"] = optimizer
    document["train_mode"] = {"train_mode": "lora"}
    return document


def lacks(option: str) -> bool:
    """Return whether the form has no field for an option, so that the preset itself sets it."""
    return option not in _FIELDS and option != "network_module" and option not in INEXPRESSIBLE


def read(file: Path) -> dict[str, Any]:
    """Read a file that the window has saved. Raises UserError for another one."""
    try:
        document: dict[str, Any] = tomlkit.parse(file.read_text(encoding="locale")).unwrap()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except (UnicodeDecodeError, TOMLKitError) as error:
        raise UserError(f"{file} is not a file of LoRA_Easy_Training_Scripts: {error}") from None
    if not isinstance(document.get("train_mode"), dict):
        raise UserError(f"{file} is not a file of LoRA_Easy_Training_Scripts; save one there with File > Save Toml")
    return document


def text(document: Mapping[str, Any]) -> str:
    """Return the file's text in ASCII, because the program reads the encoding of the system."""
    return re.sub(r"[^\x00-\x7f]", lambda match: f"\\U{ord(match[0]):08x}", tomlkit.dumps(document))


def _set(document: dict[str, Any], table: tuple[str, str], option: str, value: object) -> None:
    fields = _table(document, table)
    name = "batch_size" if option == "train_batch_size" else option
    if value is None or value is False:
        if option not in _KEPT or value is False:
            fields.pop(name, None)
    else:
        fields[name] = _value(option, value)


def _table(document: dict[str, Any], table: tuple[str, str]) -> dict[str, Any]:
    section, part = table
    fields: dict[str, Any] = document.setdefault(section, {}).setdefault(part, {})
    return fields


def _value(option: str, value: object) -> object:
    """Return an option's value as its field has it."""
    if option == "resolution":
        sides = [int(side) for side in str(value).split(",")]
        return sides if len(set(sides)) > 1 else sides[0]
    if option == "optimizer_args" and isinstance(value, (list, tuple)):
        return dict(str(word).split("=", 1) for word in value)
    return value


def _choice(optimizer: str) -> str:
    """Return the window's choice for an optimizer; the default one for an optimizer that it lacks."""
    return next((name for name in _OPTIMIZERS if name.lower() == optimizer.lower()), "AdamW")
