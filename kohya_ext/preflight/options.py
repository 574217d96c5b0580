"""Check that optimizer, scheduler and network can be imported, and that the arguments can be combined."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kohya_ext.compiling.support import ignored_dynamo_backend
from kohya_ext.config import sample_prompts
from kohya_ext.config.settings import Settings, variables
from kohya_ext.config.user_files import read_dataset_config, subsets
from kohya_ext.errors import UserError, did_you_mean, one_letter_off
from kohya_ext.preflight import Findings, deepspeed, given, numbers
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.constraints import (
    CACHED_TEXT,
    CONSTRAINTS,
    MASTERS,
    PRESERVATION,
    RELEASE,
    VARIANTS,
    Constraint,
    Run,
    is_schedule_free,
)

_BITSANDBYTES = ("AdamW8bit", "Lion8bit", "PagedAdamW", "PagedAdamW8bit", "PagedAdamW32bit", "PagedLion8bit")
_DADAPTATION = ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD")

#: Optimizers that sd-scripts knows by name, ignoring case -> module and class.
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

#: Module -> its package on PyPI, where the names differ.
_PACKAGES = {"lycoris": "lycoris-lora", "prodigyplus": "prodigy-plus-schedule-free"}

#: Optimizers that choose their step size and multiply it by the learning rate.
_ADAPTIVE = ("prodigy", "dadapt")

#: Optimizers whose steps are about as large as the learning rate.
_SIGNED = ("adam", "lion")

#: Schedule that needs arguments -> the option that may replace them, and an example.
_NEEDED = {
    "cosine_with_min_lr": ("lr_scheduler_min_lr_ratio", "--lr_scheduler_min_lr_ratio 0.1"),
    "piecewise_constant": ("", "--lr_scheduler_args \"step_rules='1:1000,0.1'\""),
}

SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "piecewise_constant"),
    *("inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay"),
)

_RATES = ("learning_rate", "unet_lr", "text_encoder_lr")

_DEFAULTS = Settings()

_NETWORK = "network"
"""Part of the file name of every script that trains a network."""


def check(script: Path, args: Namespace, findings: Findings, settings: Settings = _DEFAULTS) -> None:
    """Check optimizer, scheduler and network, then the combinations of arguments."""
    _check_optimizer(args, findings)
    _check_rates(args, findings)
    if _NETWORK in script.name:
        findings.errors.extend(_different_rates(args))
    if not is_schedule_free(vars(args)):
        _check_scheduler(args, findings)
    if _NETWORK in script.name:
        _check_network(script, args, findings)
        _check_text_encoder_rate(script, args, findings)
    for option in ("optimizer_args", "lr_scheduler_args"):
        _read_pairs(getattr(args, option, None), f"--{option}", findings)
    _check_tracker(args, findings)
    for variable in sorted(os.environ.keys() - variables()):
        if near := next((known for known in variables() if one_letter_off(variable, known)), None):
            findings.warnings.append(f"no option is set by the environment variable {variable}. Did you mean {near}?")
    if not getattr(args, "torch_compile", False) and (ignored := ignored_dynamo_backend(os.environ)) is not None:
        findings.notes.append(ignored)
    _check_samples(script, args, findings)
    family = families.of(script.name, vars(args))
    for option in given(args, *family.ignores(script.name)) if family is not None else ():
        findings.warnings.append(f"{script.name} does not read --{option}, which changes nothing; remove it")
    findings.errors.extend(numbers.problems(script, args))
    findings.errors.extend(impossible(script, args, settings))
    findings.errors.extend(deepspeed.problems(script, args))


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
            findings.errors.append(f"--optimizer_type {name}: {module or 'torch.optim'} has no {attribute}.{hint}")
    if kind is not None:
        _check_parameters(kind, getattr(args, "optimizer_args", None), f"--optimizer_args: {name}", findings)


def _check_package(module: str, wanted_by: str, findings: Findings) -> bool:
    """Return whether a module's package is installed; add an error if it is not."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return True
    findings.errors.append(
        f"{wanted_by} needs the package {package}, which is not installed: "
        f"pip install {_PACKAGES.get(package, package.replace('_', '-'))}"
    )
    return False


def _check_rates(args: Namespace, findings: Findings) -> None:
    """Warn about a learning rate that suits another kind of optimizer."""
    name = (getattr(args, "optimizer_type", None) or "AdamW").rpartition(".")[2]
    rates = [rate for key in _RATES if (rate := getattr(args, key, None)) is not None]
    highest = max((rate for value in rates for rate in (value if isinstance(value, list) else [value])), default=None)
    if highest is None or highest <= 0:
        return
    if name.lower().startswith(_ADAPTIVE) and highest < 0.01:
        findings.warnings.append(
            f"{name} chooses its step size and multiplies it by the learning rate of {highest:g}: the model would hardly "
            "change. Use --learning_rate 1"
        )
    elif any(kind in name.lower() for kind in _SIGNED) and not name.lower().startswith(_ADAPTIVE) and highest >= 0.05:
        findings.warnings.append(
            f"a learning rate of {highest:g} moves every weight by about that much in each step of {name}, which destroys a "
            "model. Use --learning_rate 1e-4 for a LoRA or 1e-5 for a fine-tune"
        )


def _different_rates(args: Namespace) -> Iterator[str]:
    """Yield a message for rates that Prodigy and D-Adaptation refuse at the first step: others than 0 and one more."""
    name = (getattr(args, "optimizer_type", None) or "").rpartition(".")[2]
    if not (name.lower() == "prodigy" or name.startswith("DAdapt")) or getattr(args, "network_train_unet_only", False):
        return
    common = getattr(args, "learning_rate", None)
    rates = [common if (rate := getattr(args, key, None)) in (None, []) else rate for key in _RATES[1:]]
    each = {rate for value in rates for rate in (value if isinstance(value, list) else [value]) if rate}
    if len(each) > 1:
        shown = ", ".join(f"{rate:g}" for rate in sorted(each))
        yield f"{name} needs the same learning rate for all weights, or 0, not {shown}; give --learning_rate 1 alone"


def _check_text_encoder_rate(script: Path, args: Namespace, findings: Findings) -> None:
    """Warn about a rate of 0 that does not freeze the text encoders: their gradients add up, and count in the norm of all."""
    family = families.of(script.name, vars(args))
    if family is None or not family.trains_text_encoders or (any(given(args, *CACHED_TEXT)) and not family.caches_t5_alone):
        return
    rates = getattr(args, "text_encoder_lr", None)
    are_zero = {*rates} == {0} if isinstance(rates, list) else rates == 0
    is_clipped = bool(getattr(args, "max_grad_norm", True))
    if are_zero and is_clipped and not getattr(args, "network_train_unet_only", False):
        findings.warnings.append(
            "--text_encoder_lr 0 still computes the text encoders' gradients, which sd-scripts never clears: in the norm of "
            "all gradients, by which it clips, they grow with every step. Use --network_train_unet_only instead"
        )


def _check_scheduler(args: Namespace, findings: Findings) -> None:
    custom = getattr(args, "lr_scheduler_type", None)
    if custom:
        module, _, attribute = custom.rpartition(".")
        kind = _attribute(module or "torch.optim.lr_scheduler", attribute)
        if kind is None:
            findings.errors.append(f"--lr_scheduler_type {custom}: {module or 'torch.optim.lr_scheduler'} has no {attribute}")
        else:
            _check_parameters(kind, getattr(args, "lr_scheduler_args", None), f"--lr_scheduler_args: {custom}", findings)
        return
    name = getattr(args, "lr_scheduler", None)
    if name is not None and not name.startswith("adafactor") and name not in SCHEDULERS:
        findings.errors.append(
            f"unknown --lr_scheduler {name!r}; use one of {', '.join(SCHEDULERS)}, or adafactor:RATE."
            + did_you_mean(name, SCHEDULERS)
        )
    elif name and getattr(args, "lr_scheduler_args", None):
        if (function := _scheduler_function(name)) is not None:
            _check_parameters(function, args.lr_scheduler_args, f"--lr_scheduler_args: {name}", findings)
    elif name in _NEEDED and getattr(args, _NEEDED[name][0], None) is None:
        findings.errors.append(f"--lr_scheduler {name} needs {_NEEDED[name][1]}")


def _scheduler_function(name: str) -> Any:
    """Return the function that upstream calls for a schedule of this name, from diffusers or transformers."""
    package = "diffusers" if name == "piecewise_constant" else "transformers"
    table = _attribute(f"{package}.optimization", "TYPE_TO_SCHEDULER_FUNCTION") or {}
    return next((function for kind, function in table.items() if getattr(kind, "value", kind) == name), None)


def _check_network(script: Path, args: Namespace, findings: Findings) -> None:
    name = getattr(args, "network_module", None)
    if not name:
        findings.errors.append("--network_module is missing; use networks.lora for a LoRA")
        return
    if not _is_importable(name, script.parent):
        near = [f"networks.{file.stem}" for file in (script.parent / "networks").glob("*.py")]
        hint = did_you_mean(name, near)
        if hint or _is_importable(name.partition(".")[0], script.parent):
            findings.errors.append(f"--network_module {name} cannot be imported.{hint}")
        else:
            _check_package(name, f"--network_module {name}", findings)
    for pair in getattr(args, "network_args", None) or []:
        if "=" not in pair:
            findings.errors.append(f"--network_args: {pair!r} must be name=value")
        elif re.search(r"\s\w+=", pair):
            words = pair.split()
            findings.errors.append(
                f"--network_args: {pair!r} is a single value; write {' '.join(words)} without quotes, or in a file {words}"
            )
        elif name.startswith("networks.") and (words := _words_of(script.parent, name)):
            argument = pair.partition("=")[0]
            if argument not in words:
                findings.warnings.append(
                    f"--network_args: {name} does not know {argument} and will ignore it."
                    + did_you_mean(argument, (word for word in words if "_" in word))
                )


def _check_tracker(args: Namespace, findings: Findings) -> None:
    """Check that the tracker is installed and has a folder, without which a run ends when its accelerator is made."""
    tracker = getattr(args, "log_with", None)
    if tracker in ("wandb", "all"):
        _check_package("wandb", f"--log_with {tracker}", findings)
    if tracker in ("tensorboard", "all") and getattr(args, "logging_dir", None) is None:
        findings.errors.append(f"--log_with {tracker} needs --logging_dir FOLDER")


def _check_samples(script: Path, args: Namespace, findings: Findings) -> None:
    """Check that the prompts of sample images can be read, and that they have a seed where the script needs one."""
    asked = next(given(args, "sample_every_n_steps", "sample_every_n_epochs", "sample_at_first"), None)
    file = getattr(args, "sample_prompts", None)
    if asked is not None and not file:
        findings.errors.append(f"--{asked} needs --sample_prompts FILE, with a prompt on each line")
    # Caching encodes the prompts, too, even if no samples are generated.
    if not file or not (asked or any(given(args, "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"))):
        return
    try:
        seedless = ", ".join(map(str, sample_prompts.without_seed(file)))
    except UserError as error:
        findings.errors.append(str(error))
        return
    if asked is None:
        return
    family = families.of(script.name, vars(args))
    if seedless and family is not None and family.samples_need_seed:
        findings.errors.append(
            f"--sample_prompts: {script.name} fails at a prompt without a seed (number {seedless}); add --d 1 to it"
        )


def _words_of(folder: Path, module: str) -> set[str]:
    """Return every word in the source of a network, which accepts any argument and looks up the known ones."""
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    common = file.with_name("network_base.py")
    return {word for source in (file, common) if source.is_file() for word in re.findall(r"\w+", source.read_text("utf-8"))}


def _is_importable(module: str, folder: Path) -> bool:
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
                f"{label}: {pair!r} must be name=value, with a Python value: eps=1e-8, betas=(0.9,0.99), x='text'"
            )
    return read


def _check_parameters(kind: Any, pairs: Iterable[str] | None, label: str, findings: Findings) -> None:
    try:
        parameters = inspect.signature(kind).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for pair in pairs or []:
        name, _, value = pair.partition("=")
        if name == "lr":
            findings.errors.append(f"{label}: lr is given twice; remove it, --learning_rate sets it")
        elif name not in parameters:
            findings.errors.append(f"{label} does not accept {name}.{did_you_mean(name, parameters)}")
        elif isinstance(parameters[name].default, (int, float)) and re.fullmatch(r"\d+,\d+", value):
            findings.errors.append(f"{label}: {pair} is a pair of numbers; write {pair.replace(',', '.')}")


# --- combinations ----------------------------------------------------------------------------------------------------


def _broken(constraints: Iterable[Constraint], script: Path, values: Mapping[str, object]) -> Iterator[str]:
    """Yield the messages of the constraints that a run breaks."""
    for constraint in constraints:
        yield from constraint.problems(Run(script.name, values))


def impossible(script: Path, args: Namespace, settings: Settings = _DEFAULTS) -> Iterator[str]:
    """Yield the problems of the whole run, then of each subset with its own settings from --dataset_config."""
    of_subsets = [constraint for constraint in CONSTRAINTS if constraint.of_subset]
    of_run = [constraint for constraint in CONSTRAINTS if not constraint.of_subset]
    ours = (VARIANTS, PRESERVATION, RELEASE, MASTERS, "num_processes")
    values = {**vars(args), **{name: settings[name] for name in ours}}
    yield from _broken(of_run, script, values)
    if not getattr(args, "dataset_config", None):
        yield from _broken(of_subsets, script, values)
        return
    try:
        document = read_dataset_config(Path(args.dataset_config))
    except UserError:
        return  # reported where the training set is checked
    for subset in subsets(document):
        where = subset.get("image_dir") or subset.get("metadata_file")
        broken = _broken(of_subsets, script, {**values, **subset})
        for problem in (*numbers.problems_in_subset(script, subset), *broken):
            yield f"{args.dataset_config}, {where}: {problem}"
