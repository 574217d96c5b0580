"""Optimizer, scheduler, network: can they be imported; and combinations of arguments that cannot work.

The rules are upstream's own: each is an assertion or an error of its scripts, most of them behind the loading of the model.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kohya_ext.compiling.support import ignored_dynamo_backend
from kohya_ext.config.user_files import read_dataset_config, subsets
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.preflight import Findings, given, numbers
from kohya_ext.sdscripts import families

_BITSANDBYTES = ("AdamW8bit", "Lion8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit")
_DADAPTATION = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD")

#: The optimizers that sd-scripts knows by name, in any case of letters -> the module and the class.
OPTIMIZERS = {
    "AdamW": ("torch.optim", "AdamW"),
    "SGDNesterov": ("torch.optim", "SGD"),
    "Adafactor": ("transformers.optimization", "Adafactor"),
    "Lion": ("lion_pytorch", "Lion"),
    **{name: ("bitsandbytes.optim", name) for name in _BITSANDBYTES},
    "SGDNesterov8bit": ("bitsandbytes.optim", "SGD8bit"),
    **{name: ("dadaptation", name) for name in _DADAPTATION},
    **dict.fromkeys(("DAdaptation", "DAdaptAdamPreprint"), ("dadaptation.experimental", "DAdaptAdamPreprint")),
    "DAdaptAdanIP": ("dadaptation.experimental", "DAdaptAdanIP"),
    "Prodigy": ("prodigyopt", "Prodigy"),
    **{name: ("schedulefree", name) for name in ("RAdamScheduleFree", "AdamWScheduleFree", "SGDScheduleFree")},
}

#: Where a package is not named as its module is, on PyPI.
_PACKAGES = {"lycoris": "lycoris-lora", "prodigyplus": "prodigy-plus-schedule-free"}

#: Optimizers that find the size of their steps, and multiply it with the learning rate.
_ADAPTIVE = ("prodigy", "dadapt")

#: Optimizers whose steps are about as large as the learning rate.
_SIGNED = ("adam", "lion")

SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "piecewise_constant"),
    *("inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay"),
)

_RATES = ("learning_rate", "unet_lr", "text_encoder_lr")

_NETWORK = "network"
"""What the names of the scripts contain that train a network beside the model."""


def check(script: Path, args: Namespace, findings: Findings) -> None:
    """Check what is imported by name, then every combination."""
    _check_optimizer(args, findings)
    _check_rates(args, findings)
    _check_attention(script, args, findings)
    if not _is_schedule_free(args):
        _check_scheduler(args, findings)
    if _NETWORK in script.name:
        _check_network(script, args, findings)
    for option in ("optimizer_args", "lr_scheduler_args"):
        _read_pairs(getattr(args, option, None), f"--{option}", findings)
    if not getattr(args, "torch_compile", False) and (ignored := ignored_dynamo_backend(os.environ)) is not None:
        findings.notes.append(ignored)
    findings.errors.extend(numbers.problems(script, args))
    findings.errors.extend(_impossible(script, args))
    findings.errors.extend(_impossible_in_subsets(script, args))


# --- imported by name ------------------------------------------------------------------------------------------------


def _check_optimizer(args: Namespace, findings: Findings) -> None:
    name = getattr(args, "optimizer_type", None) or ""
    for switch, its in (("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")):
        if not name and getattr(args, switch, False):
            name = its
    if not name:
        return
    known = {key.lower(): value for key, value in OPTIMIZERS.items()}.get(name.lower())
    if known is not None:
        _check_package(known[0], f"--optimizer_type {name}", findings)
        kind = _attribute(*known) if getattr(args, "optimizer_args", None) else None
    else:
        module, _, attribute = name.rpartition(".")
        kind = _attribute(module or "torch.optim", attribute)
        if kind is None and _check_package(module or "torch", f"--optimizer_type {name}", findings):
            hint = did_you_mean(name, OPTIMIZERS)
            findings.errors.append(f"--optimizer_type {name}: there is no {attribute} in {module or 'torch.optim'}.{hint}")
    if kind is not None:
        _check_parameters(kind, getattr(args, "optimizer_args", None), f"--optimizer_args: {name}", findings)


def _check_package(module: str, wanted_by: str, findings: Findings) -> bool:
    """Return whether the package that a module is in is installed; an error names it where it is not."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return True
    findings.errors.append(
        f"{wanted_by} needs the package {package}, which is not installed: "
        f"pip install {_PACKAGES.get(package, package.replace('_', '-'))}"
    )
    return False


def _check_rates(args: Namespace, findings: Findings) -> None:
    """Warn about a learning rate that belongs to another kind of optimizer."""
    name = (getattr(args, "optimizer_type", None) or "AdamW").rpartition(".")[2]
    rates = [rate for key in _RATES if (rate := getattr(args, key, None)) is not None]
    highest = max((rate for value in rates for rate in (value if isinstance(value, list) else [value])), default=None)
    if highest is None or highest <= 0:
        return
    if name.lower().startswith(_ADAPTIVE) and highest < 0.01:
        findings.warnings.append(
            f"{name} finds the size of its steps itself and multiplies it with the learning rate, {highest:g}: hardly anything "
            "would be trained. Give --learning_rate 1"
        )
    elif any(kind in name.lower() for kind in _SIGNED) and not name.lower().startswith(_ADAPTIVE) and highest >= 0.05:
        findings.warnings.append(
            f"a learning rate of {highest:g} moves every weight by about that much in each step of {name}, which destroys a "
            "model. Give --learning_rate 1e-4 for a LoRA or 1e-5 for a fine-tune"
        )


def _check_attention(script: Path, args: Namespace, findings: Findings) -> None:
    # The other scripts take the option and use PyTorch's attention.
    family = families.of(script.name, vars(args))
    used = family is not None and (family.unet or (family.attn_mode and script.name == family.lora))
    if used and getattr(args, "xformers", False) and importlib.util.find_spec("xformers") is None:
        findings.errors.append("--xformers: the package xformers is not installed. Use --sdpa, PyTorch's own, instead")


def _check_scheduler(args: Namespace, findings: Findings) -> None:
    custom = getattr(args, "lr_scheduler_type", None)
    if custom:
        module, _, attribute = custom.rpartition(".")
        kind = _attribute(module or "torch.optim.lr_scheduler", attribute)
        if kind is None:
            findings.errors.append(
                f"--lr_scheduler_type {custom}: there is no {attribute} in {module or 'torch.optim.lr_scheduler'}"
            )
        else:
            _check_parameters(kind, getattr(args, "lr_scheduler_args", None), f"--lr_scheduler_args: {custom}", findings)
        return
    name = getattr(args, "lr_scheduler", None)
    if name and not name.startswith("adafactor") and name not in SCHEDULERS:
        findings.errors.append(
            f"--lr_scheduler {name} is not known: it is one of {', '.join(SCHEDULERS)}, or adafactor:RATE."
            + did_you_mean(name, SCHEDULERS)
        )
    elif name and getattr(args, "lr_scheduler_args", None) and (function := _scheduler_function(name)) is not None:
        _check_parameters(function, args.lr_scheduler_args, f"--lr_scheduler_args: {name}", findings)


def _scheduler_function(name: str) -> Any:
    """The function that upstream calls for a schedule of this name: diffusers' for one of them, transformers' for others."""
    package = "diffusers" if name == "piecewise_constant" else "transformers"
    table = _attribute(f"{package}.optimization", "TYPE_TO_SCHEDULER_FUNCTION") or {}
    return next((function for kind, function in table.items() if getattr(kind, "value", kind) == name), None)


def _is_schedule_free(args: Namespace) -> bool:
    """Whether upstream leaves the scheduler out, and looks at none of its arguments."""
    name = (getattr(args, "optimizer_type", None) or "").lower()
    return name.endswith("schedulefree") or bool(getattr(args, "optimizer_schedulefree_wrapper", False))


def _check_network(script: Path, args: Namespace, findings: Findings) -> None:
    name = getattr(args, "network_module", None)
    if not name:
        findings.errors.append("no --network_module: networks.lora trains a LoRA")
        return
    if not _can_be_found(name, script.parent):
        near = [f"networks.{file.stem}" for file in (script.parent / "networks").glob("*.py")]
        hint = did_you_mean(name, near)
        if hint or _can_be_found(name.partition(".")[0], script.parent):
            findings.errors.append(f"--network_module {name} cannot be imported.{hint}")
        else:
            _check_package(name, f"--network_module {name}", findings)
    for pair in getattr(args, "network_args", None) or []:
        if "=" not in pair:
            findings.errors.append(f"--network_args: {pair!r} must be name=value")
        elif name.startswith("networks.") and (words := _words_of(script.parent, name)):
            argument = pair.partition("=")[0]
            if argument not in words:
                findings.warnings.append(
                    f"--network_args: {name} does not know {argument} and will ignore it."
                    + did_you_mean(argument, (word for word in words if "_" in word))
                )


def _words_of(folder: Path, module: str) -> set[str]:
    """Every word in the source of one of sd-scripts' networks: they look their arguments up by name, and take any."""
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    common = file.with_name("network_base.py")
    return {word for source in (file, common) if source.is_file() for word in re.findall(r"\w+", source.read_text("utf-8"))}


def _can_be_found(module: str, folder: Path) -> bool:
    sys.path.insert(0, str(folder))
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.remove(str(folder))


def _attribute(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _read_pairs(pairs: Iterable[str] | None, label: str, findings: Findings) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        try:
            if not equals:
                raise ValueError
            read[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            findings.errors.append(
                f"{label}: {pair!r} must be name=value, the value as Python writes it: eps=1e-8, betas=(0.9,0.99), x='text'"
            )
    return read


def _check_parameters(kind: Any, pairs: Iterable[str] | None, label: str, findings: Findings) -> None:
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in (pair.partition("=")[0] for pair in pairs or []):
        if name == "lr":
            findings.errors.append(f"{label}: lr is given twice: --learning_rate says it")
        elif name not in parameters:
            findings.errors.append(f"{label} takes no {name}.{did_you_mean(name, parameters)}")


# --- combinations ----------------------------------------------------------------------------------------------------


def _impossible_in_subsets(script: Path, args: Namespace) -> Iterable[str]:
    """What a --dataset_config says of a single subset counts for it over the arguments."""
    if not getattr(args, "dataset_config", None):
        yield from _impossible_in_subset(script, args)
        return
    try:
        document = read_dataset_config(Path(args.dataset_config))
    except UserError:
        return  # reported where the training set is checked
    for subset in subsets(document):
        where = subset.get("image_dir") or subset.get("metadata_file")
        findings = _impossible_in_subset(script, Namespace(**{**vars(args), **subset}))
        for problem in (*numbers.problems_in_subset(script, subset), *findings):
            yield f"{args.dataset_config}, {where}: {problem}"


def _impossible_in_subset(script: Path, args: Namespace) -> Iterable[str]:
    for name in given(args, "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"):
        changing = ("shuffle_caption", "token_warmup_step", "caption_tag_dropout_rate")
        family = families.of(script.name, vars(args))
        dropout = () if family is not None and family.caches_empty_caption else ("caption_dropout_rate",)
        yield from _together(args, name, *changing, *dropout, because="the caption is encoded once, so it cannot change")
        break
    for name in given(args, "cache_latents", "cache_latents_to_disk"):
        yield from _together(args, name, "color_aug", "random_crop", because="the latents are computed once")
        break


def _together(args: Namespace, first: str, *others: str, because: str) -> Iterable[str]:
    if getattr(args, first, None):
        for other in given(args, *others):
            yield f"--{first} and --{other} cannot go together: {because}"


def _impossible(script: Path, args: Namespace) -> Iterable[str]:
    def has(name: str) -> bool:
        return bool(getattr(args, name, None))

    def together(first: str, *others: str, because: str) -> Iterable[str]:
        return _together(args, first, *others, because=because)

    network, precision = _NETWORK in script.name, getattr(args, "mixed_precision", "no")
    family = families.of(script.name, vars(args))
    sdxl = family is not None and family.name == "sdxl"
    if has("cache_text_encoder_outputs") or has("cache_text_encoder_outputs_to_disk"):
        name = "cache_text_encoder_outputs" if has("cache_text_encoder_outputs") else "cache_text_encoder_outputs_to_disk"
        yield from together(name, "weighted_captions", because="upstream does not support it")
        if network and sdxl and not has("network_train_unet_only"):
            yield f"--{name} needs --network_train_unet_only: a text encoder whose outputs are cached cannot be trained"
        if not network and sdxl:
            yield from together(name, "train_text_encoder", because="a text encoder whose outputs are cached cannot be trained")
    for name in given(args, "cache_latents", "cache_latents_to_disk"):
        yield from together(name, "train_inpainting", because="the mask is drawn anew each step")
    yield from together("network_train_unet_only", "network_train_text_encoder_only", because="nothing would be trained")
    yield from together("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers", because="choose one")
    yield from together("blocks_to_swap", "cpu_offload_checkpointing", because="upstream does not support it")
    adafactor = (getattr(args, "optimizer_type", None) or "").lower() == "adafactor"
    if has("fused_backward_pass") and not adafactor:
        yield "--fused_backward_pass works with --optimizer_type Adafactor only"
    accumulation = getattr(args, "gradient_accumulation_steps", 1) or 1
    for name in given(args, "fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers"):
        if accumulation > 1:
            yield f"--{name} and --gradient_accumulation_steps {accumulation} cannot go together: no gradient is kept"
    no_offload = family is not None and script.name == family.lora and not family.offloads_checkpoints
    if no_offload and has("cpu_offload_checkpointing") and has("gradient_checkpointing"):
        yield f"--cpu_offload_checkpointing ends in a TypeError in {script.name}: its model does not know it"
    scheduler = getattr(args, "lr_scheduler_type", None) or getattr(args, "lr_scheduler", None)
    without_warmup = has("lr_scheduler_type") or scheduler == "constant" or str(scheduler).startswith("adafactor")
    if has("lr_warmup_steps") and without_warmup and not _is_schedule_free(args):
        instead = " or take constant_with_warmup" if scheduler == "constant" else ""
        yield f"--lr_warmup_steps is an error with --lr_scheduler {scheduler}: leave it out{instead}"
    bucket_steps = 1 if family is None else family.bucket_steps[script.name != family.lora]
    if has("enable_bucket") and (getattr(args, "bucket_reso_steps", None) or bucket_steps) % bucket_steps:
        yield f"--bucket_reso_steps must be a multiple of {bucket_steps} for {script.name}"
    for name, its in (("full_bf16", "bf16"), ("full_fp16", "fp16")):
        if has(name) and precision != its:
            yield f"--{name} needs --mixed_precision {its}, not {precision}"
    for name in given(args, "fp8_base", "fp8_base_unet"):
        if precision == "no":
            yield f"--{name} needs --mixed_precision bf16 or fp16"
    if has("adaptive_noise_scale") and not has("noise_offset"):
        yield "--adaptive_noise_scale needs --noise_offset"
    if has("scale_v_pred_loss_like_noise_pred") and not has("v_parameterization"):
        yield "--scale_v_pred_loss_like_noise_pred needs --v_parameterization"
    yield from together("v_pred_like_loss", "v_parameterization", because="the model predicts v already")
    if sdxl:
        yield from together("v2", "pretrained_model_name_or_path", because="SDXL has no v2")
    if str(scheduler).startswith("adafactor") and not adafactor:
        yield "--lr_scheduler adafactor works with --optimizer_type Adafactor only"
