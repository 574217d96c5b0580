"""The options that change the memory of a training step, read from a command line without importing the script.

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

from kohya_ext.compiling.support import reason_not_to_compile, reason_not_to_record
from kohya_ext.config import sample_prompts
from kohya_ext.config.arguments import find_problem
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.preset_files import FAMILIES
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import Settings, negated_flags, options
from kohya_ext.config.user_files import read_dataset_config
from kohya_ext.errors import UserError
from kohya_ext.run.safetensors_header import count_blocks, read_header
from kohya_ext.sdscripts import families, networks
from kohya_ext.sdscripts.constraints import stepping_in_backward
from kohya_ext.sdscripts.families import Family

#: Assumed tokens of HunyuanImage's captions, which have 1,024 at most. A batch has the length of its longest caption.
HUNYUAN_CAPTION_TOKENS = 256

#: Replaces the path of a file of 8-bit weights in a normalized configuration.
FP8 = "fp8"

#: Type of a field -> its parser.
_PARSERS: Mapping[Any, Any] = {int: int, float: float, str: str}


SD3_DEFAULT = "3.5 medium"

#: The other models of Stable Diffusion 3.
SD3 = (SD3_LARGE, SD3_MEDIUM) = ("3.5 large", "3 medium")

#: Families whose models can be recorded as CUDA graphs. The others read results on the CPU, or copy from it, in each step.
RECORDED = ("sd15", "sdxl", "flux", "anima")

#: Networks whose layers compute with so many small matrices that an estimate takes more than six minutes.
_TOO_SLOW = ("networks.boft",)

Value = TypeVar("Value")


@dataclass(frozen=True)
class MemoryConfig:
    """The options of one run that change its memory."""

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
    scale_weight_norms: float | None = None
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
    """Once normalized, the model of Stable Diffusion 3, None for 3.5 medium, or Anima's number of blocks, None for 28."""
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
    """Once normalized, the size of the largest image in that file, in pixels as ``resolution``."""
    sample_every_n_steps: int | None = None
    sample_every_n_epochs: int | None = None
    sample_at_first: bool = False
    ddp_gradient_as_bucket_view: bool = False
    deepspeed: bool = False
    zero_stage: int = 2
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    torch_compile: bool = False
    compile: bool = False
    split_attn: bool = False
    gradient_checkpointing_ratio: float | None = None
    """This field and the following ones are the extension's own options, read from its settings."""
    keep_attention: bool = False
    selective_torch_compile: bool = False
    activation_memory_budget: float | None = None
    """The fraction of activations that compiled blocks keep; None is all of them."""
    fused_operations: bool = False
    cuda_graphs: bool = False
    """Once normalized, whether the model is recorded."""
    expandable_segments: bool = False
    gradient_release: bool = False
    stochastic_rounding: bool = False
    master_weights: bool = False
    optimizer_states_on_host: bool = False
    optimizer_states_on_host_ratio: float = 1.0
    ema: bool = False
    """Once normalized, whether the averaged weights are in GPU memory."""
    ema_device: str = "cpu"
    base_precision: str | None = None
    """The 8-bit format of the frozen base, ``int8`` or ``fp8``; None for 16 or 32 bits."""
    int8_convolutions: bool = False
    """Once normalized, whether the frozen convolutions are in 8 bits."""
    one_way_block_swap: bool | None = None
    """False if frozen blocks are copied in both directions; once normalized, None without swapped blocks and for others."""
    num_processes: int | None = None
    """Processes of the run, one for each GPU. Once normalized, None for one, and 2 for any other number without DeepSpeed."""

    @property
    def family(self) -> Family:
        """The model family. Raises ValueError for a script without a family."""
        family = families.of(self.script, vars(self))
        if family is None:
            raise ValueError(f"{self.script} belongs to no model family")
        return family

    @property
    def kind(self) -> str:
        """The folder of its presets: ``sdxl-finetune``, ``chroma-lora``."""
        return str(self.family.presets(self.script))

    @property
    def trains_network(self) -> bool:
        """True for a LoRA or another network on a frozen base, False for a fine-tune."""
        return self.script == self.family.lora

    @property
    def trains_text_encoder(self) -> bool:
        """Whether a fine-tune trains text encoders: train_db.py does unless ``stop_text_encoder_training`` is negative."""
        if self.script == "train_db.py":
            return self.stop_text_encoder_training is None or self.stop_text_encoder_training >= 0
        return self.train_text_encoder

    @property
    def assumed(self) -> str:
        """The assumptions about the user's files and captions, for messages; empty without any."""
        t5 = "fp8" if self.t5xxl == FP8 else "16 bits (for fp8, give the fp8 file with --t5xxl)"
        return self.family.assumed.format(t5=t5, sd3=self.pretrained_model_name_or_path or SD3_DEFAULT)

    @property
    def steps_in_backward(self) -> bool:
        """Whether the optimizer steps within the backward pass."""
        return stepping_in_backward(self) is not None

    def key(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, and the script: the key of an estimate."""
        defaults = MemoryConfig(self.script)
        return {name: value for name, value in asdict(self).items() if name == "script" or value != getattr(defaults, name)}


def read(command: CommandLine) -> tuple[MemoryConfig, list[str]]:
    """Return the configuration of a command line over its preset and config file, and the flags it does not contain.

    Raises UserError for a value that cannot be read, and as :func:`from_values`.
    """
    values, flags = _parse(command)
    return from_values(values, command), flags


def any_script(command: CommandLine) -> MemoryConfig:
    """Return the configuration of a command line whose script may belong to no model family.

    Raises UserError for a value that cannot be read.
    """
    return _config(_parse(command)[0], command)


def _parse(command: CommandLine) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a configuration's fields on a command line, and the flags that are none of them."""
    parser = _parser()
    defaults: dict[str, Any] = {}
    layers = [(f"preset {command.presets.label}", {key: value.value for key, value in command.presets.values.items()})]
    if command.config is not None:
        layers.append((str(command.config.path), dict(command.config.values)))
    for where, values in layers:
        ours = {key: value for key, value in values.items() if any(action.dest == key for action in parser._actions)}
        for key, value in ours.items():
            if (problem := find_problem(parser, key, value)) is not None:
                raise UserError(f"{where}: {problem}")
        defaults.update(ours)
    parsed, rest = parser.parse_known_args(command.words, argparse.Namespace(**defaults))
    return vars(parsed), [word.split("=")[0] for word in rest if word.startswith("--")]


def from_values(values: Mapping[str, Any], command: CommandLine) -> MemoryConfig:
    """Return the configuration from a script's parsed arguments and the extension's settings.

    Raises UserError for a script without presets, whose runs have no configuration (ControlNet, textual inversion, LECO).
    """
    if command.name not in FAMILIES:
        raise UserError(f"{command.name} has no presets; scripts with presets: {', '.join(sorted(FAMILIES))}")
    if values.get("network_module") in _TOO_SLOW:
        raise UserError(
            f"the memory of {values['network_module']} cannot be estimated: each layer computes with thousands of small "
            "matrices, which takes too long here; start the run and read its peak in the journal"
        )
    return _config(values, command)


def swaps_one_way(settings: Settings) -> bool:
    """Return whether a run's frozen blocks are copied in one direction, on a GPU that has passed its self-test."""
    name = "one_way_block_swap"
    if {"*", name} & set(settings.disable_patch):
        return False
    return bool(settings["speed"] != "off" if settings[name] is None else settings[name])


def _config(values: Mapping[str, Any], command: CommandLine) -> MemoryConfig:
    known = {**command.presets.assumed, **{name: value for name, value in values.items() if value is not None}}
    given = {name: known[name] for name in _fields() if name in known}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
        elif isinstance(value, Path):
            given[name] = str(value)
    own = {name: value for name in own_fields() if (value := command.settings[name]) is not None}
    own["one_way_block_swap"] = swaps_one_way(command.settings)
    return MemoryConfig(command.name, **given, **own)


def normalized(config: MemoryConfig) -> MemoryConfig:
    """Return a configuration with the same memory, in which options of equal memory have one value.

    For example, a dataset file is replaced by its largest batch.
    """
    defaults = MemoryConfig(config.script)
    config = replace(config, **{name: getattr(defaults, name) for name in config.family.ignores(config.script)})
    width, height, batch = largest_batch(config)
    lora = config.trains_network
    compiled = config.selective_torch_compile and reason_not_to_compile(config) is None
    return replace(
        config,
        resolution=f"{width},{height}",
        train_batch_size=batch,
        dataset_config=None,
        enable_bucket=False,
        min_bucket_reso=defaults.min_bucket_reso,
        max_bucket_reso=defaults.max_bucket_reso,
        bucket_reso_steps=defaults.bucket_reso_steps,
        full_bf16=config.full_bf16 or config.full_fp16,
        full_fp16=False,
        # The transformers always use PyTorch's own attention.
        sdpa=(config.sdpa or config.xformers) and not config.mem_eff_attn and config.family.unet,
        xformers=False,
        cache_latents=config.cache_latents or config.cache_latents_to_disk,
        cache_latents_to_disk=False,
        cache_text_encoder_outputs=config.cache_text_encoder_outputs or config.cache_text_encoder_outputs_to_disk,
        cache_text_encoder_outputs_to_disk=False,
        gradient_accumulation_steps=min(config.gradient_accumulation_steps, 3),
        scale_weight_norms=1.0 if config.scale_weight_norms and lora else None,
        stop_text_encoder_training=None if (config.stop_text_encoder_training or 0) >= 0 else -1,
        max_grad_norm=float(config.max_grad_norm != 0),
        t5xxl=FP8 if _keeps_fp8(config) and _is_fp8(config.t5xxl) else None,
        t5xxl_max_token_length=_none_if(config.t5xxl_max_token_length, config.family.t5_tokens),
        blocks_to_swap=config.blocks_to_swap or None,
        max_token_length=_none_if(config.max_token_length, 75),
        gemma2_max_token_length=_none_if(config.gemma2_max_token_length, 256),
        text_encoder_batch_size=_none_if(config.text_encoder_batch_size, batch),
        network_args=_without_defaults(config.network_args),
        optimizer_args=config.optimizer_args or None,
        network_dim=(config.network_dim or networks.default_dim(config.network_module)) if lora else None,
        gradient_checkpointing_ratio=config.gradient_checkpointing_ratio
        if config.gradient_checkpointing and config.gradient_checkpointing_ratio != 1
        else None,
        keep_attention=config.keep_attention and config.gradient_checkpointing and not compiled,
        selective_torch_compile=compiled,
        cuda_graphs=config.cuda_graphs and lora and _is_recorded(config),
        **_parallel(config),
        one_way_block_swap=False if config.one_way_block_swap is False and lora and config.blocks_to_swap else None,
        int8_convolutions=config.int8_convolutions and config.base_precision == "int8" and config.family.unet,
        stochastic_rounding=config.stochastic_rounding and config.gradient_release,
        master_weights=config.master_weights and config.gradient_release,
        optimizer_states_on_host_ratio=config.optimizer_states_on_host_ratio if config.optimizer_states_on_host else 1.0,
        ema=config.ema and config.ema_device == "gpu",
        ema_device=defaults.ema_device,
        # The transformers' scripts always load models into host memory.
        lowram=config.lowram and config.family.unet,
        sample_prompts=largest_sample(config),
        sample_every_n_steps=None,
        sample_every_n_epochs=None,
        sample_at_first=False,
        activation_memory_budget=_none_if(config.activation_memory_budget, 1.0) if compiled else None,
        learning_rate=defaults.learning_rate if lora or config.learning_rate else 0.0,
        pretrained_model_name_or_path=_model(config),
        unet_lr=None if config.unet_lr or not lora else _nonzero_rate(config.unet_lr),
        text_encoder_lr=None if all(config.text_encoder_lr or ()) or not lora else _nonzero_rates(config.text_encoder_lr),
        learning_rate_te=_nonzero_rate(config.learning_rate_te) if config.trains_text_encoder else None,
        learning_rate_te1=_nonzero_rate(config.learning_rate_te1) if config.trains_text_encoder else None,
        learning_rate_te2=_nonzero_rate(config.learning_rate_te2) if config.trains_text_encoder else None,
    )


def _parallel(config: MemoryConfig) -> dict[str, Any]:
    """Return the normalized options of several processes. Each has the same memory with DistributedDataParallel."""
    several = (config.num_processes or 1) > 1
    defaults = MemoryConfig(config.script)
    if not config.deepspeed:
        zero = {name: getattr(defaults, name) for name in ("zero_stage", "offload_optimizer_device", "offload_param_device")}
        as_view = config.ddp_gradient_as_bucket_view and several
        return {**zero, "num_processes": 2 if several else None, "ddp_gradient_as_bucket_view": as_view}
    return {"num_processes": config.num_processes if several else None, "ddp_gradient_as_bucket_view": False}


def with_bf16(config: MemoryConfig) -> MemoryConfig:
    """Return a configuration with bf16 for fp16. Its memory is within 1%, and the package's table has its estimate.

    A VAE in fp32 that caches one image at a time does not raise the peak, except Anima's.
    """
    if config.mixed_precision != "fp16":
        return config
    raises_peak = not config.cache_latents or config.vae_batch_size > 1 or config.family.name == "anima"
    return replace(config, mixed_precision="bf16", no_half_vae=config.no_half_vae and raises_peak)


def _is_recorded(config: MemoryConfig) -> bool:
    """Return whether --cuda_graphs records the model. What breaks a compiled block's graph breaks a recording, too."""
    return reason_not_to_record(config) is None and reason_not_to_compile(config) is None and config.family.name in RECORDED


def _without_defaults(network_args: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return a network's arguments without those that select all blocks of FLUX, which the kohya_ss GUI always writes."""
    return (
        tuple(word for word in network_args or () if not re.fullmatch(r"train_(double|single)_block_indices=all", word)) or None
    )


def _none_if(value: Value | None, default: Value | None) -> Value | None:
    return None if value == default else value


def _keeps_fp8(config: MemoryConfig) -> bool:
    """Return whether an 8-bit text encoder keeps its precision: flux_train_network.py casts it to 16 bits otherwise."""
    return config.family.name in ("flux", "chroma") and config.fp8_base and not config.fp8_base_unet


def _is_fp8(name: str | None) -> bool:
    """Return whether a file has 8-bit weights, by its header, or by its name if it cannot be read."""
    if not name or name == FP8:
        return name == FP8
    try:
        return "F8_E4M3" in read_header(Path(name)).dtypes.values()
    except (OSError, ValueError):
        return "fp8" in Path(name).name


def largest_sample(config: MemoryConfig) -> str | None:
    """Return width and height of the largest image that the run samples, "1024,1024"; None without sampling."""
    if not _samples(config):
        return None
    assert config.sample_prompts is not None, "sampling needs prompts"
    if re.fullmatch(r"\d+,\d+", config.sample_prompts):
        return config.sample_prompts
    width = height = _default_sample_size(config)
    with contextlib.suppress(UserError):  # see sample_size_problem
        width, height = sample_prompts.largest(config.sample_prompts, default=width)
    return f"{width},{height}"


def sample_size_problem(config: MemoryConfig) -> str | None:
    """Return why a run's sample images are assumed to have the default size; None if their sizes are known."""
    if config.script not in FAMILIES or not _samples(config):
        return None
    side = _default_sample_size(config)
    try:
        sample_prompts.largest(str(config.sample_prompts), side)
    except UserError as error:
        return f"{error}; assuming {side}x{side} images"
    return None


def _samples(config: MemoryConfig) -> bool:
    if config.sample_prompts is None:
        return False
    normalized_size = re.fullmatch(r"\d+,\d+", config.sample_prompts) is not None
    return normalized_size or bool(config.sample_at_first or config.sample_every_n_steps or config.sample_every_n_epochs)


def _default_sample_size(config: MemoryConfig) -> int:
    return config.family.sample_side


def _model(config: MemoryConfig) -> str | None:
    """Return what decides the model's size: Stable Diffusion 3's model, or an unusual number of blocks; None for the usual."""
    name, family = config.pretrained_model_name_or_path, config.family
    if family.name == "sd3":
        return _sd3_model(name)
    if not family.usual_blocks or name is None:
        return None
    count = int(name) if name.isdecimal() else count_blocks(name)
    return None if count in (None, family.usual_blocks) else str(count)


def _sd3_model(name: str | None) -> str | None:
    """Return the Stable Diffusion 3 model of a checkpoint, by its header or else its name; None for 3.5 medium."""
    if name is None or name in SD3:
        return name
    try:
        layers = " ".join(read_header(Path(name)).shapes)
    except (OSError, ValueError):
        return SD3_LARGE if "large" in Path(name).name.lower() else None
    if "joint_blocks.37." in layers:
        return SD3_LARGE
    return None if "attn.ln_k." in layers else SD3_MEDIUM


def _nonzero_rates(rates: Sequence[float] | None) -> tuple[float, ...]:
    return tuple(float(rate != 0) for rate in rates or ())


def _nonzero_rate(rate: float | None) -> float | None:
    return None if rate is None else float(rate != 0)


def size(config: MemoryConfig) -> tuple[int, int]:
    """Return width and height in pixels of a normalized configuration."""
    width, height = str(config.resolution).split(",")
    return int(width), int(height)


# --- the largest batch -----------------------------------------------------------------------------------------------


def largest_batch(config: MemoryConfig) -> tuple[int, int, int]:
    """Return width, height and number of images of the batch with the most pixels. Raises UserError without a resolution."""
    batches = list(_batches(config))
    return max(batches, key=lambda batch: batch[0] * batch[1] * batch[2])


def _batches(config: MemoryConfig) -> Iterator[tuple[int, int, int]]:
    if config.dataset_config is None:
        if config.resolution is None:
            raise UserError("an estimate needs the resolution; give --resolution, a preset or --dataset_config")
        yield _batch(config, config.resolution, config.train_batch_size, config.enable_bucket)
        return
    file = Path(config.dataset_config)
    document = read_dataset_config(file)
    general = document.get("general", {})
    for dataset in document.get("datasets", []) or [{}]:
        values = {**general, **dataset}
        resolution = values.get("resolution", config.resolution)
        if resolution is None:
            raise UserError(f"--dataset_config {file}: a dataset has no resolution; set it there or give --resolution")
        batch_size = values.get("batch_size", config.train_batch_size)
        yield _batch(config, resolution, batch_size, values.get("enable_bucket", config.enable_bucket))


def _batch(config: MemoryConfig, resolution: object, batch: object, buckets: bool) -> tuple[int, int, int]:
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
            f"invalid resolution {resolution!r} or batch size {batch!r}; use --resolution 1024 or 1024,768 (64 or more) and a "
            "batch size of 1 or more"
        ) from None
    if buckets:
        width, height = _largest_bucket(width * height, config)
    return width, height, count


def _largest_bucket(area: int, config: MemoryConfig) -> tuple[int, int]:
    """Return the bucket with the most pixels, up to ``area``; sides are multiples of the step up to ``--max_bucket_reso``."""
    step = config.bucket_reso_steps
    square = math.isqrt(area) // step * step
    sides = range(config.min_bucket_reso // step * step or step, config.max_bucket_reso + 1, step)
    boxes = [(side, min(config.max_bucket_reso, area // side // step * step)) for side in sides]
    return max([(square, square), *boxes], key=lambda box: (box[0] * box[1], -abs(box[0] - box[1])))


# --- the parser ------------------------------------------------------------------------------------------------------


@functools.cache
def own_fields() -> tuple[str, ...]:
    """Return the fields of a configuration that are the extension's own options."""
    own = {name for name, _ in options()}
    return tuple(row.name for row in fields(MemoryConfig) if row.name in own)


@functools.cache
def _fields() -> dict[str, tuple[Any, bool]]:
    """Return field name -> (type of a value, whether it takes several)."""
    rows = {}
    hints = typing.get_type_hints(MemoryConfig)
    for row in fields(MemoryConfig):
        if row.name in ("script", *own_fields()):
            continue
        kind = hints[row.name]
        kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
        several = typing.get_origin(kinds[0]) is tuple
        rows[row.name] = (typing.get_args(kinds[0])[0] if several else kinds[0], several)
    return rows


@functools.cache
def _parser() -> argparse.ArgumentParser:
    """Return a parser for the fields of a configuration, which no caller may change."""
    defaults = MemoryConfig("")
    parser = QuietParser(add_help=False)
    for name, (kind, several) in _fields().items():
        default = getattr(defaults, name)
        if kind is bool:
            parser.add_argument(f"--{name}", action="store_true")
            parser.add_argument(*negated_flags(name), dest=name, action="store_false", default=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", type=_PARSERS[kind], nargs="*" if several else None, default=default)
    return parser
