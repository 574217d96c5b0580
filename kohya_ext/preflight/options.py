"""Check that optimizer, scheduler and network can be imported, and that the arguments can be combined.

Each rule is an assertion or an error in upstream's scripts, most of which upstream reaches only after loading the model.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.compiling.support import ignored_dynamo_backend
from kohya_ext.config import sample_prompts
from kohya_ext.config.user_files import read_dataset_config, subsets
from kohya_ext.errors import UserError, did_you_mean
from kohya_ext.preflight import Findings, deepspeed, given, numbers
from kohya_ext.sdscripts import families

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

SCHEDULERS = (
    *("linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "piecewise_constant"),
    *("inverse_sqrt", "cosine_with_min_lr", "warmup_stable_decay"),
)

_RATES = ("learning_rate", "unet_lr", "text_encoder_lr")

#: Scripts that cast the weights they train to the type of --mixed_precision. PyTorch's gradient scaler refuses fp16 weights,
#: which upstream changes with --full_fp16 alone.
CASTS_WEIGHTS = ("flux_train.py", "flux_train_control_net.py", "lumina_train.py", "sdxl_train_control_net_lllite.py")

_NETWORK = "network"
"""Part of the file name of every script that trains a network."""


def check(script: Path, args: Namespace, findings: Findings) -> None:
    """Check optimizer, scheduler and network, then the combinations of arguments."""
    _check_optimizer(args, findings)
    _check_rates(args, findings)
    if not _is_schedule_free(args):
        _check_scheduler(args, findings)
    if _NETWORK in script.name:
        _check_network(script, args, findings)
    for option in ("optimizer_args", "lr_scheduler_args"):
        _read_pairs(getattr(args, option, None), f"--{option}", findings)
    if not getattr(args, "torch_compile", False) and (ignored := ignored_dynamo_backend(os.environ)) is not None:
        findings.notes.append(ignored)
    _check_samples(script, args, findings)
    family = families.of(script.name, vars(args))
    for option in given(args, *family.ignores(script.name)) if family is not None else ():
        findings.warnings.append(f"{script.name} does not read --{option}, which changes nothing; remove it")
    findings.errors.extend(numbers.problems(script, args))
    findings.errors.extend(_impossible(script, args))
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
    if name and not name.startswith("adafactor") and name not in SCHEDULERS:
        findings.errors.append(
            f"unknown --lr_scheduler {name}; use one of {', '.join(SCHEDULERS)}, or adafactor:RATE."
            + did_you_mean(name, SCHEDULERS)
        )
    elif name and getattr(args, "lr_scheduler_args", None) and (function := _scheduler_function(name)) is not None:
        _check_parameters(function, args.lr_scheduler_args, f"--lr_scheduler_args: {name}", findings)


def _scheduler_function(name: str) -> Any:
    """Return the function that upstream calls for a schedule of this name, from diffusers or transformers."""
    package = "diffusers" if name == "piecewise_constant" else "transformers"
    table = _attribute(f"{package}.optimization", "TYPE_TO_SCHEDULER_FUNCTION") or {}
    return next((function for kind, function in table.items() if getattr(kind, "value", kind) == name), None)


def _is_schedule_free(args: Namespace) -> bool:
    """Return whether upstream ignores the scheduler and its arguments."""
    name = (getattr(args, "optimizer_type", None) or "").lower()
    return name.endswith("schedulefree") or bool(getattr(args, "optimizer_schedulefree_wrapper", False))


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
        elif name.startswith("networks.") and (words := _words_of(script.parent, name)):
            argument = pair.partition("=")[0]
            if argument not in words:
                findings.warnings.append(
                    f"--network_args: {name} does not know {argument} and will ignore it."
                    + did_you_mean(argument, (word for word in words if "_" in word))
                )


def _check_samples(script: Path, args: Namespace, findings: Findings) -> None:
    """Check that the prompts of sample images can be read, and that they have a seed where the script needs one."""
    if not any(given(args, "sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")):
        return
    file = getattr(args, "sample_prompts", None)
    if not file:
        return
    try:
        seedless = ", ".join(map(str, sample_prompts.without_seed(file)))
    except UserError as error:
        findings.warnings.append(str(error))
        return
    family = families.of(script.name, vars(args))
    if seedless and family is not None and family.sampler.needs_seed:
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
    for name in (pair.partition("=")[0] for pair in pairs or []):
        if name == "lr":
            findings.errors.append(f"{label}: lr is given twice; remove it, --learning_rate sets it")
        elif name not in parameters:
            findings.errors.append(f"{label} does not accept {name}.{did_you_mean(name, parameters)}")


# --- combinations ----------------------------------------------------------------------------------------------------


class _Run:
    """A run's arguments, and the facts about them that the rules read."""

    def __init__(self, script: Path, args: Namespace) -> None:
        def get(name: str) -> Any:
            return getattr(args, name, None)

        family = families.of(script.name, vars(args))
        self.args, self.script, self.network = args, script.name, _NETWORK in script.name
        self.sdxl = family is not None and family.name == "sdxl"
        # FLUX and SD3 train CLIP while T5's outputs are cached. Lumina 2's text encoder runs in spite of the cache if trained.
        trains_cached = family is not None and (family.caches_t5_alone or family.name == "lumina")
        self.freezes_cached_text = self.network and not trains_cached
        self.empty_caption_cached = family is not None and family.caches_empty_caption
        self.swaps_trained = family is not None and script.name in family.finetune and family.max_blocks_to_swap > 0
        self.offloads = family is None or script.name != family.lora or family.offloads_checkpoints
        self.bucket_steps = 1 if family is None else family.bucket_steps[script.name != family.lora]
        self.bucket_rest = (get("bucket_reso_steps") or self.bucket_steps) % self.bucket_steps
        self.cached_text = next(given(args, "cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk"), None)
        self.cached_latents = next(given(args, "cache_latents", "cache_latents_to_disk"), None)
        self.precision = getattr(args, "mixed_precision", "no")
        self.accumulation = get("gradient_accumulation_steps") or 1
        self.adafactor = str(get("optimizer_type")).lower() == "adafactor"
        self.scheduler = str(get("lr_scheduler_type") or get("lr_scheduler"))
        self.own_rate = self.scheduler.startswith("adafactor")
        fixed = self.has("lr_scheduler_type") or self.scheduler == "constant" or self.own_rate
        self.refuses_warmup = fixed and not _is_schedule_free(args)

    def has(self, name: str) -> bool:
        """Return whether an argument has a true value."""
        return bool(getattr(self.args, name, None))


@dataclass(frozen=True)
class _Rule:
    """A combination of arguments that a script cannot run with."""

    options: tuple[str, ...]
    """The rule applies to each of these that is set; to the run itself where empty."""
    condition: Callable[[_Run], object]
    """Whether it cannot work in this run."""
    message: str
    """Its fields: ``option`` and ``run``."""


def _together(first: str, *others: str, because: str) -> _Rule:
    """Return the rule that an option excludes others."""
    return _Rule(others, lambda run: run.has(first), f"--{first} and --{{option}} cannot be combined: {because}")


_WITH_TEXT = "--{run.cached_text} and --{option} cannot be combined: "
_WITH_LATENTS = "--{run.cached_latents} and --{option} cannot be combined: "
_IS_FROZEN = "a text encoder whose outputs are cached cannot be trained"
_IS_FIXED = "the caption is encoded once, so it cannot change"
_CAPTIONS = ("shuffle_caption", "token_warmup_step", "caption_tag_dropout_rate")
_FUSED = ("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")
_NO_WARMUP = "--{option} is an error with --lr_scheduler {run.scheduler}; remove it"

# fmt: off
#: Checked for each subset of a --dataset_config, else for the whole run.
_SUBSET_RULES = (
    _Rule(_CAPTIONS, lambda run: run.cached_text, f"{_WITH_TEXT}{_IS_FIXED}"),
    _Rule(("caption_dropout_rate",), lambda run: run.cached_text and not run.empty_caption_cached, f"{_WITH_TEXT}{_IS_FIXED}"),
    _Rule(("color_aug", "random_crop"), lambda run: run.cached_latents, f"{_WITH_LATENTS}the latents are computed once"),
)

_RULES = (
    _Rule(("weighted_captions",), lambda run: run.cached_text, f"{_WITH_TEXT}upstream does not support it"),
    _Rule((), lambda run: run.cached_text and run.freezes_cached_text and not run.has("network_train_unet_only"),
          f"--{{run.cached_text}} needs --network_train_unet_only: {_IS_FROZEN}"),
    _Rule(("train_text_encoder",), lambda run: run.cached_text and run.sdxl and not run.network, f"{_WITH_TEXT}{_IS_FROZEN}"),
    _Rule(("cache_latents", "cache_latents_to_disk"), lambda run: run.has("train_inpainting"),
          "--{option} and --train_inpainting cannot be combined: every step draws another mask"),
    _together("network_train_unet_only", "network_train_text_encoder_only", because="nothing would be trained"),
    _together(*_FUSED, because="choose one"),
    _together("blocks_to_swap", "cpu_offload_checkpointing", because="upstream does not support it"),
    _Rule(_FUSED[:1], lambda run: not run.adafactor, "--{option} works with --optimizer_type Adafactor only"),
    _Rule(("blocks_to_swap",), lambda run: run.swaps_trained and not any(map(run.has, _FUSED)),
          "{run.script} fails at its first step with --{option}, because the optimizer finds weights in host memory; add "
          "--fused_backward_pass, which needs --optimizer_type Adafactor"),
    _Rule(_FUSED, lambda run: run.accumulation > 1,
          "--{option} and --gradient_accumulation_steps {run.accumulation} cannot be combined: no gradient is kept"),
    _Rule(("cpu_offload_checkpointing",), lambda run: run.has("gradient_checkpointing") and not run.offloads,
          "--{option} fails with a TypeError in {run.script}; remove it"),
    _Rule(("lr_warmup_steps",), lambda run: run.refuses_warmup and run.scheduler == "constant",
          f"{_NO_WARMUP} or use constant_with_warmup"),
    _Rule(("lr_warmup_steps",), lambda run: run.refuses_warmup and run.scheduler != "constant", _NO_WARMUP),
    _Rule(("enable_bucket",), lambda run: run.bucket_rest,
          "--bucket_reso_steps must be a multiple of {run.bucket_steps} for {run.script}"),
    _Rule(("full_bf16",), lambda run: run.precision != "bf16", "--{option} needs --mixed_precision bf16, not {run.precision}"),
    _Rule(("full_fp16",), lambda run: run.precision != "fp16", "--{option} needs --mixed_precision fp16, not {run.precision}"),
    _Rule((), lambda run: run.precision == "fp16" and run.script in CASTS_WEIGHTS and not run.has("full_fp16"),
          "{run.script} fails at its first step with --mixed_precision fp16; use --mixed_precision bf16, or add --full_fp16"),
    _Rule(("fp8_base", "fp8_base_unet"), lambda run: run.precision == "no", "--{option} needs --mixed_precision bf16 or fp16"),
    _Rule(("save_state", "save_state_on_train_end"), lambda run: run.script.endswith("_leco.py"),
          "{run.script} does not read --{option}; use --save_state_every_n_minutes"),
    _Rule(("adaptive_noise_scale",), lambda run: not run.has("noise_offset"), "--{option} needs --noise_offset"),
    _Rule(("scale_v_pred_loss_like_noise_pred",), lambda run: not run.has("v_parameterization"),
          "--{option} needs --v_parameterization"),
    _together("v_pred_like_loss", "v_parameterization", because="the model predicts v already"),
    _Rule(("pretrained_model_name_or_path",), lambda run: run.sdxl and run.has("v2"),
          "--v2 and --{option} cannot be combined: SDXL has no v2"),
    _Rule((), lambda run: run.own_rate and not run.adafactor,
          "--lr_scheduler adafactor works with --optimizer_type Adafactor only"),
)
# fmt: on


def _broken(rules: Iterable[_Rule], script: Path, args: Namespace) -> Iterator[str]:
    """Yield the message of each rule that a run breaks."""
    run = _Run(script, args)
    for rule in rules:
        for option in given(args, *rule.options) if rule.options else ("",):
            if rule.condition(run):
                yield rule.message.format(option=option, run=run)


def _impossible(script: Path, args: Namespace) -> Iterator[str]:
    """Yield the problems of the whole run, then of each subset with its own settings from --dataset_config."""
    yield from _broken(_RULES, script, args)
    if not getattr(args, "dataset_config", None):
        yield from _broken(_SUBSET_RULES, script, args)
        return
    try:
        document = read_dataset_config(Path(args.dataset_config))
    except UserError:
        return  # reported where the training set is checked
    for subset in subsets(document):
        where = subset.get("image_dir") or subset.get("metadata_file")
        broken = _broken(_SUBSET_RULES, script, Namespace(**{**vars(args), **subset}))
        for problem in (*numbers.problems_in_subset(script, subset), *broken):
            yield f"{args.dataset_config}, {where}: {problem}"
