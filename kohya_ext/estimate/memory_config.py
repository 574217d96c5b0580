"""What determines the memory of a training step, read from a command line without importing the script.

The fields of :class:`MemoryConfig` are sd-scripts' own keys with its own defaults. Nothing else on a command line changes the
estimate.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kohya_ext.compiling.support import reason_to_stand_aside
from kohya_ext.config.arguments import find_problem
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.preset_files import FAMILIES
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import negated_flags
from kohya_ext.config.user_files import read_dataset_config
from kohya_ext.errors import UserError
from kohya_ext.estimate import prompt_sizes
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Family

#: What stands for a file of weights in 8 bits once choices are normalized.
FP8 = "fp8"

#: A whole number or a number is written as such; text in a list stands for ``nargs="*"``.
_PARSERS: Mapping[Any, Any] = {int: int, float: float, str: str}


#: Stable Diffusion 3 beside 3.5 medium.
SD3 = (SD3_LARGE, SD3_MEDIUM) = ("3.5 large", "3 medium")

#: The extension's own options among them.
OWN = (
    "gradient_checkpointing_ratio",
    "selective_torch_compile",
    "activation_memory_budget",
    "fused_operations",
    "ema",
    "ema_device",
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class MemoryConfig:
    """One run's choices, as far as they cost memory."""

    script: str
    resolution: str | None = None
    train_batch_size: int = 1
    dataset_config: str | None = None
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    cpu_offload_checkpointing: bool = False
    unsloth_offload_checkpointing: bool = False
    blocks_to_swap: int | None = None
    mixed_precision: str = "no"
    full_fp16: bool = False
    full_bf16: bool = False
    fp8_base: bool = False
    fp8_base_unet: bool = False
    fp8_scaled: bool = False
    fp8_vl: bool = False
    text_encoder_cpu: bool = False
    attn_mode: str | None = None
    vae_chunk_size: int | None = None
    vae_disable_cache: bool = False
    qwen_image_vae_2d: bool = False
    sdpa: bool = False
    xformers: bool = False
    mem_eff_attn: bool = False
    no_half_vae: bool = False
    vae_batch_size: int = 1
    text_encoder_batch_size: int | None = None
    cache_latents: bool = False
    cache_latents_to_disk: bool = False
    cache_text_encoder_outputs: bool = False
    cache_text_encoder_outputs_to_disk: bool = False
    max_token_length: int | None = None
    network_module: str | None = None
    network_dim: int | None = None
    network_args: tuple[str, ...] | None = None
    network_dropout: float | None = None
    network_train_unet_only: bool = False
    network_train_text_encoder_only: bool = False
    train_text_encoder: bool = False
    stop_text_encoder_training: int | None = None
    learning_rate: float = 2e-06
    unet_lr: float | None = None
    text_encoder_lr: tuple[float, ...] | None = None
    learning_rate_te: float | None = None
    learning_rate_te1: float | None = None
    learning_rate_te2: float | None = None
    optimizer_type: str = ""
    use_8bit_adam: bool = False
    use_lion_optimizer: bool = False
    optimizer_args: tuple[str, ...] | None = None
    max_grad_norm: float = 1.0
    fused_backward_pass: bool = False
    fused_optimizer_groups: int | None = None
    num_last_block_to_freeze: int | None = None
    dim_from_weights: bool = False
    train_inpainting: bool = False
    pretrained_model_name_or_path: str | None = None
    """Once normalized, which Stable Diffusion 3 it is, if not 3.5 medium."""
    v2: bool = False
    model_type: str = "flux"
    t5xxl: str | None = None
    t5xxl_max_token_length: int | None = None
    apply_t5_attn_mask: bool = False
    apply_lg_attn_mask: bool = False
    train_t5xxl: bool = False
    gemma2_max_token_length: int | None = None
    qwen3_max_token_length: int = 512
    t5_max_token_length: int = 512
    blockwise_fused_optimizers: bool = False
    lowram: bool = False
    sample_prompts: str | None = None
    """Once normalized, the largest picture of that file in pixels, as ``resolution`` is."""
    sample_every_n_steps: int | None = None
    sample_every_n_epochs: int | None = None
    sample_at_first: bool = False
    deepspeed: bool = False
    torch_compile: bool = False
    compile: bool = False
    split_attn: bool = False
    gradient_checkpointing_ratio: float | None = None
    """This and what follows is the extension's own, from its settings, which know where it was said."""
    selective_torch_compile: bool = False
    activation_memory_budget: float | None = None
    fused_operations: bool = False
    """Of compiled blocks; None is all of their activations."""
    ema: bool = False
    """Once normalized, whether an average lies on the card."""
    ema_device: str = "cpu"

    @property
    def family(self) -> Family:
        """The family that is trained. Raises ValueError for a script that is not in the table."""
        family = families.of(self.script, vars(self))
        if family is None:
            raise ValueError(f"{self.script} is in no family")
        return family

    @property
    def kind(self) -> str:
        """The family and what is trained, as its presets are named: ``sdxl-finetune``, ``chroma-lora``."""
        return str(self.family.presets(self.script))

    @property
    def trains_network(self) -> bool:
        """True for a LoRA or another network on a frozen base, False for a fine-tune."""
        return self.script == self.family.lora

    @property
    def trains_text_encoder(self) -> bool:
        """Whether a fine-tune trains text encoders: train_db.py does unless told to stop before it begins."""
        if self.script == "train_db.py":
            return self.stop_text_encoder_training is None or self.stop_text_encoder_training >= 0
        return self.train_text_encoder

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps within the backward pass, in one of upstream's three ways."""
        return bool(self.fused_backward_pass or self.fused_optimizer_groups or self.blockwise_fused_optimizers)

    def key(self) -> dict[str, Any]:
        """What tells this run's figures from another's: the choices that differ from the defaults."""
        defaults = MemoryConfig(self.script)
        return {name: value for name, value in asdict(self).items() if name == "script" or value != getattr(defaults, name)}


def read(command: CommandLine) -> tuple[MemoryConfig, list[str]]:
    """Return the choices of a command line over its preset and config file, and the flags that are none of them.

    Raises UserError for a value that cannot be read, and as :func:`from_values`.
    """
    parser = _parser()
    layers = [(f"preset {command.presets.label}", {key: value.value for key, value in command.presets.values.items()})]
    if command.config is not None:
        layers.append((str(command.config.path), dict(command.config.values)))
    for where, values in layers:
        ours = {key: value for key, value in values.items() if any(action.dest == key for action in parser._actions)}
        for key, value in ours.items():
            if (problem := find_problem(parser, key, value)) is not None:
                raise UserError(f"{where}: {problem}")
        parser.set_defaults(**ours)
    found, rest = parser.parse_known_args(command.words)
    return from_values(vars(found), command), [word.split("=")[0] for word in rest if word.startswith("--")]


def from_values(values: Mapping[str, Any], command: CommandLine) -> MemoryConfig:
    """Return the choices among a script's arguments, whoever parsed them, and the extension's own.

    Raises UserError for a script whose memory is not modelled (ControlNet, LLLite, textual inversion, LECO).
    """
    if command.name not in FAMILIES:
        raise UserError(f"the memory of {command.name} cannot be estimated. Scripts that can: {', '.join(sorted(FAMILIES))}")
    said = {**command.presets.assumed, **{name: value for name, value in values.items() if value is not None}}
    given = {name: said[name] for name in _rows() if name in said}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
        elif isinstance(value, Path):
            given[name] = str(value)
    return MemoryConfig(command.name, **given, **{name: getattr(command.settings, name) for name in OWN})


def normalized(choices: MemoryConfig) -> MemoryConfig:
    """Return choices with the same figures and one spelling for what costs the same.

    A dataset file gives way to its largest batch, fp16 to bf16, xformers to PyTorch's own attention, a learning rate to
    whether there is one.
    """
    width, height, batch = _largest_batch(choices)
    lora = choices.trains_network
    compiled = choices.selective_torch_compile and reason_to_stand_aside(choices) is None
    defaults = MemoryConfig(choices.script)
    return replace(
        choices,
        resolution=f"{width},{height}",
        train_batch_size=batch,
        dataset_config=None,
        enable_bucket=False,
        min_bucket_reso=defaults.min_bucket_reso,
        max_bucket_reso=defaults.max_bucket_reso,
        bucket_reso_steps=defaults.bucket_reso_steps,
        mixed_precision="bf16" if choices.mixed_precision == "fp16" else choices.mixed_precision,
        full_bf16=choices.full_bf16 or choices.full_fp16,
        full_fp16=False,
        # The transformers' attention is PyTorch's own whatever is said.
        sdpa=(choices.sdpa or choices.xformers) and not choices.mem_eff_attn and choices.family.unet,
        xformers=False,
        cache_latents=choices.cache_latents or choices.cache_latents_to_disk,
        cache_latents_to_disk=False,
        cache_text_encoder_outputs=choices.cache_text_encoder_outputs or choices.cache_text_encoder_outputs_to_disk,
        cache_text_encoder_outputs_to_disk=False,
        gradient_accumulation_steps=min(choices.gradient_accumulation_steps, 2),
        stop_text_encoder_training=None if (choices.stop_text_encoder_training or 0) >= 0 else -1,
        max_grad_norm=float(choices.max_grad_norm != 0),
        t5xxl=FP8 if _keeps_fp8(choices) and _in_fp8(choices.t5xxl) else None,
        t5xxl_max_token_length=_unless(choices.t5xxl_max_token_length, choices.family.t5_tokens),
        network_dim=(choices.network_dim or 4) if lora else None,
        gradient_checkpointing_ratio=choices.gradient_checkpointing_ratio
        if choices.gradient_checkpointing and choices.gradient_checkpointing_ratio != 1
        else None,
        selective_torch_compile=compiled,
        ema=choices.ema and choices.ema_device == "gpu",
        ema_device=defaults.ema_device,
        # The transformers' scripts load every model into host memory whatever is said.
        lowram=choices.lowram and choices.family.unet,
        sample_prompts=_largest_sample(choices),
        sample_every_n_steps=None,
        sample_every_n_epochs=None,
        sample_at_first=False,
        activation_memory_budget=_unless(choices.activation_memory_budget, 1.0) if compiled else None,
        learning_rate=defaults.learning_rate if lora or choices.learning_rate else 0.0,
        pretrained_model_name_or_path=_sd3(choices.pretrained_model_name_or_path) if choices.family.name == "sd3" else None,
        unet_lr=None if choices.unet_lr or not lora else _whether(choices.unet_lr),
        text_encoder_lr=None if all(choices.text_encoder_lr or ()) or not lora else _which(choices.text_encoder_lr),
        learning_rate_te=_whether(choices.learning_rate_te),
        learning_rate_te1=_whether(choices.learning_rate_te1),
        learning_rate_te2=_whether(choices.learning_rate_te2),
    )


def _unless(value: Value | None, usual: Value | None) -> Value | None:
    return None if value == usual else value


def _keeps_fp8(choices: MemoryConfig) -> bool:
    """Whether a text encoder in 8 bits stays so: flux_train_network.py casts it to 16 otherwise."""
    return choices.family.name in ("flux", "chroma") and choices.fp8_base and not choices.fp8_base_unet


def _in_fp8(name: str | None) -> bool:
    """Whether a file holds 8-bit weights: its header says so, or, where there is no such file, its name."""
    if not name or name == FP8:
        return name == FP8
    try:
        return "F8_E4M3" in read_header(Path(name)).dtypes.values()
    except (OSError, ValueError):
        return "fp8" in Path(name).name


def _largest_sample(choices: MemoryConfig) -> str | None:
    """Return width and height of the largest picture that the run makes of its prompts; None when it makes none."""
    if not _samples(choices):
        return None
    assert choices.sample_prompts is not None, "nothing is sampled without"
    if re.fullmatch(r"\d+,\d+", choices.sample_prompts):
        return choices.sample_prompts
    width = height = _usual_sample(choices)
    with contextlib.suppress(UserError):  # see unread_samples
        width, height = prompt_sizes.largest(choices.sample_prompts, usual=width)
    return f"{width},{height}"


def unread_samples(choices: MemoryConfig) -> str | None:
    """Return in words why a run's sample pictures are taken to be of the usual size; None if they are not."""
    if not _samples(choices):
        return None
    usual = _usual_sample(choices)
    try:
        prompt_sizes.largest(str(choices.sample_prompts), usual)
    except UserError as error:
        return f"{error}; its pictures are taken to be {usual}x{usual}"
    return None


def _samples(choices: MemoryConfig) -> bool:
    if choices.sample_prompts is None:
        return False
    normal = re.fullmatch(r"\d+,\d+", choices.sample_prompts) is not None
    return normal or bool(choices.sample_at_first or choices.sample_every_n_steps or choices.sample_every_n_epochs)


def _usual_sample(choices: MemoryConfig) -> int:
    return choices.family.sampler.side


def _sd3(name: str | None) -> str | None:
    """Return which model of its family a checkpoint is, from its header or else from its name; None for 3.5 medium."""
    if name is None or name in SD3:
        return name
    try:
        layers = " ".join(read_header(Path(name)).shapes)
    except (OSError, ValueError):
        return SD3_LARGE if "large" in Path(name).name.lower() else None
    if "joint_blocks.37." in layers:
        return SD3_LARGE
    return None if "attn.ln_k." in layers else SD3_MEDIUM


def _which(rates: Sequence[float] | None) -> tuple[float, ...]:
    return tuple(float(rate != 0) for rate in rates or ())


def _whether(rate: float | None) -> float | None:
    return None if rate is None else float(rate != 0)


def size(choices: MemoryConfig) -> tuple[int, int]:
    """Return width and height in pixels of normalized choices."""
    width, height = str(choices.resolution).split(",")
    return int(width), int(height)


# --- the largest batch -----------------------------------------------------------------------------------------------


def _largest_batch(choices: MemoryConfig) -> tuple[int, int, int]:
    batches = list(_batches(choices))
    return max(batches, key=lambda batch: batch[0] * batch[1] * batch[2])


def _batches(choices: MemoryConfig) -> Iterator[tuple[int, int, int]]:
    if choices.dataset_config is None:
        if choices.resolution is None:
            raise UserError("the figures depend on the resolution: give --resolution, a preset or --dataset_config")
        yield _batch(choices, choices.resolution, choices.train_batch_size, choices.enable_bucket)
        return
    file = Path(choices.dataset_config)
    document = read_dataset_config(file)
    general = document.get("general", {})
    for dataset in document.get("datasets", []) or [{}]:
        said = {**general, **dataset}
        resolution = said.get("resolution", choices.resolution)
        if resolution is None:
            raise UserError(f"--dataset_config {file}: a dataset without a resolution, and no --resolution")
        batch_size = said.get("batch_size", choices.train_batch_size)
        yield _batch(choices, resolution, batch_size, said.get("enable_bucket", choices.enable_bucket))


def _batch(choices: MemoryConfig, resolution: object, batch: object, buckets: bool) -> tuple[int, int, int]:
    try:
        words = resolution if isinstance(resolution, (list, tuple)) else str(resolution).split(",")
        numbers = [int(word) for word in words]
        width, height = numbers * 2 if len(numbers) == 1 else numbers
        if min(width, height) < 64:
            raise ValueError
        count = int(str(batch))
        if count < 1:
            raise ValueError
    except ValueError:
        raise UserError(
            f"resolution {resolution!r}, batch size {batch!r}: write --resolution 1024 or 1024,768 (64 or more) and a batch "
            "size of 1 or more"
        ) from None
    if buckets:
        width, height = _largest_bucket(width * height, choices)
    return width, height, count


def _largest_bucket(area: int, choices: MemoryConfig) -> tuple[int, int]:
    """Return the bucket with the most pixels: no side beyond ``--max_bucket_reso``, no more than ``area``, in steps."""
    step = choices.bucket_reso_steps
    square = math.isqrt(area) // step * step
    sides = range(choices.min_bucket_reso // step * step or step, choices.max_bucket_reso + 1, step)
    boxes = [(side, min(choices.max_bucket_reso, area // side // step * step)) for side in sides]
    return max([(square, square), *boxes], key=lambda box: (box[0] * box[1], -abs(box[0] - box[1])))


# --- the parser ------------------------------------------------------------------------------------------------------


@functools.cache
def _rows() -> dict[str, tuple[Any, bool]]:
    """Field name -> (type of one value, whether it takes several)."""
    rows = {}
    hints = typing.get_type_hints(MemoryConfig)
    for row in fields(MemoryConfig):
        if row.name in ("script", *OWN):
            continue
        kind = hints[row.name]
        options = [option for option in typing.get_args(kind) or (kind,) if option is not type(None)]
        several = typing.get_origin(options[0]) is tuple
        rows[row.name] = (typing.get_args(options[0])[0] if several else options[0], several)
    return rows


def _parser() -> argparse.ArgumentParser:
    defaults = MemoryConfig("")
    parser = QuietParser(add_help=False)
    for name, (kind, several) in _rows().items():
        default = getattr(defaults, name)
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true")
            parser.add_argument(*negated_flags(name), dest=name, action="store_false", default=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", type=_PARSERS[kind], nargs="*" if several else None, default=default)
    return parser
