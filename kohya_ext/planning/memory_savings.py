"""Changes that make a run fit in less memory, cheapest first, with the cost of each.

The order follows common practice: precision, caching, gradient checkpointing, batch size (batch times accumulation is kept),
optimizer, fused backward pass, precision and location of the base model, and last what the model learns. ``plan``, the
out-of-memory message and ``--on_oom retry`` read the table through :func:`steps`. This module does not import torch.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kohya_ext.config.command_line import option_words
from kohya_ext.config.settings import options
from kohya_ext.quantization.selection import reason_to_refuse
from kohya_ext.run.safetensors_header import count_blocks
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.constraints import (
    CACHED_LATENTS,
    CACHED_TEXT,
    FUSED_OPTIMIZERS,
    ON_HOST,
    RELEASE,
    VARIANTS,
    Run,
    newly_broken,
)
from kohya_ext.sdscripts.families import Family

#: The phases of a run, as ``estimate`` names them.
Phase = Literal[
    "loading",
    "caching latents",
    "caching text encoder outputs",
    "forward",
    "backward",
    "optimizer step",
    "sampling",
    "saving",
]

#: Arguments by key, as sd-scripts and the extension name them. False turns a switch off; a list is several words.
Changes = Mapping[str, object]

#: Options that checkpoint less than every block.
SHARE, KEPT = "gradient_checkpointing_ratio", "keep_attention"

TRAINING: frozenset[Phase] = frozenset({"forward", "backward", "optimizer step"})
_ACTIVATIONS: frozenset[Phase] = frozenset({"forward", "backward"})
_RESIDENT: frozenset[Phase] = TRAINING | {"sampling", "saving"}


@dataclass(frozen=True)
class Attempt:
    """One command line, reduced to what :func:`steps` reads."""

    script: str
    """The script's file name."""
    values: Mapping[str, Any]
    """Final arguments by key, including presets, the config file and the extension's own options. A missing key has its default
    or is unknown to the script."""
    takes: Callable[[str], bool]
    """Whether the script's parser has a key. Not called for the extension's options."""
    experimental: bool = False
    """Whether experimental savings are offered, which the GPU then supports."""
    bf16: bool = True
    """Whether the GPU computes in bf16."""

    @property
    def family(self) -> Family | None:
        """The trained family, or None for a script without presets."""
        family = families.of(self.script, self.values)
        return family if family is not None and family.presets(self.script) is not None else None

    @property
    def trains_network(self) -> bool:
        """True for a LoRA or another network on a frozen base model."""
        return "network" in self.script

    def has(self, *names: str) -> bool:
        """Return whether any of these keys has a true value."""
        return any(self.values.get(name) for name in names)

    def allows(self, changes: Changes) -> bool:
        """Return whether sd-scripts can run with some changes, as far as it can run without them."""
        return not newly_broken(Run(self.script, self.values), changes)

    def number(self, name: str, default: int) -> int:
        """Return an integer value, or ``default`` where it is None or missing."""
        value = self.values.get(name)
        return default if value is None else int(value)


@dataclass(frozen=True)
class MemorySaving:
    """One kind of change that saves memory."""

    name: str
    what: str
    """What it does; completes the message "the cheapest next step: ..."."""
    costs: str
    exact: bool
    """Whether the trained file is bit for bit the same."""
    resumes: bool
    """Whether a state saved before the change can be resumed after it."""
    helps: frozenset[Phase]
    """The phases whose peak it lowers."""
    changes: Callable[[Attempt], Changes]
    """Returns the arguments to change; empty where it is done already or contradicts the other arguments."""


@dataclass(frozen=True)
class Step:
    """A memory saving as it applies to one run."""

    saving: MemorySaving
    changes: Changes

    @property
    def words(self) -> list[str]:
        """The changes as command-line words."""
        return option_words(self.changes)


def steps(attempt: Attempt, phase: Phase | None = None) -> Iterator[Step]:
    """Yield the savings that apply to a run, cheapest first; with ``phase``, only those that lower its peak."""
    ours = {name for name, _ in options()}
    for saving in MEMORY_SAVINGS:
        if phase is not None and phase not in saving.helps:
            continue
        changes = saving.changes(attempt)
        if changes and all(key in ours or attempt.takes(key) for key in changes) and attempt.allows(changes):
            yield Step(saving, changes)


def after(attempt: Attempt, step: Step) -> Attempt:
    """Return the run with a step applied."""
    return replace(attempt, values={**attempt.values, **step.changes})


# --- when a saving applies -------------------------------------------------------------------------------------------


def _mixed_precision(run: Attempt) -> Changes:
    if run.values.get("mixed_precision") in ("bf16", "fp16"):
        return {}
    return {"mixed_precision": "bf16"} if run.bf16 else {"mixed_precision": "fp16"}


def _attention(run: Attempt) -> Changes:
    # The other families always use PyTorch's attention.
    can = run.family is not None and run.family.unet and not run.has("sdpa", "xformers", "mem_eff_attn")
    return {"sdpa": True} if can else {}


def _vae_batch(run: Attempt) -> Changes:
    return {"vae_batch_size": 1} if run.number("vae_batch_size", 1) > 1 else {}


def _text_batch(run: Attempt) -> Changes:
    return {"text_encoder_batch_size": 1} if run.number("text_encoder_batch_size", 1) > 1 else {}


def _latents(run: Attempt) -> Changes:
    return {} if run.has(*CACHED_LATENTS) else {"cache_latents": True}


def _trains_text_encoder(run: Attempt) -> bool:
    if run.trains_network:
        return not run.has("network_train_unet_only")
    return run.has("train_text_encoder", "train_t5xxl")


def _text_encoder_outputs(run: Attempt) -> Changes:
    return {} if run.has(*CACHED_TEXT) or _trains_text_encoder(run) else {"cache_text_encoder_outputs": True}


def _caption_variants(run: Attempt) -> Changes:
    cached = _text_encoder_outputs(run)
    return {**cached, VARIANTS: 8} if cached and not run.allows(cached) else {}


def _checkpointing(run: Attempt) -> Changes:
    if not run.has("gradient_checkpointing"):
        # Inside a checkpoint a budget saves nothing and recomputes twice.
        budget = run.values.get("activation_memory_budget")
        return {"gradient_checkpointing": True, **({} if budget in (None, 1) else {"activation_memory_budget": 1})}
    share = run.values.get(SHARE)
    if share is None and run.has("vram_budget") and run.values.get("activation_memory_budget") is None:
        return {"gradient_checkpointing": True, SHARE: 1}  # the budget then frees no block
    return {} if share in (None, 1) else {SHARE: 1}


def _attention_again(run: Attempt) -> Changes:
    return {KEPT: False} if run.has("gradient_checkpointing") and run.has(KEPT) else {}


def less_checkpointing(run: Attempt, shares: Sequence[float]) -> list[Changes]:
    """Return the changes that recompute less than every block, those with the most memory first, for some shares of blocks.

    Transformers keep their attention with each share: a byte of it saves two to six times as much time as a byte of blocks that
    are not checkpointed, in the U-Net of SDXL a third as much (predicted for an RTX 3090).
    """
    if run.family is None or run.family.unet:
        return [{SHARE: share} for share in shares]
    return [*({SHARE: share, KEPT: True} for share in shares), {KEPT: True}]


def _batch(run: Attempt) -> Changes:
    size, accumulated = run.number("train_batch_size", 1), run.number("gradient_accumulation_steps", 1)
    # A dataset file sets its own batch sizes.
    if size < 2 or run.has("dataset_config", "in_json"):
        return {}
    smaller = next(part for part in range(size // 2, 0, -1) if size % part == 0)
    return {"train_batch_size": smaller, "gradient_accumulation_steps": accumulated * (size // smaller)}


def _optimizer(run: Attempt) -> str:
    if run.has("use_8bit_adam"):
        return "adamw8bit"
    if run.has("use_lion_optimizer"):
        return "lion"
    return str(run.values.get("optimizer_type") or "AdamW").lower()


def _eight_bits(run: Attempt) -> Changes:
    if _optimizer(run) != "adamw" or importlib.util.find_spec("bitsandbytes") is None:
        return {}
    return {"optimizer_type": "AdamW8bit"}


def _adafactor(run: Attempt) -> Changes:
    if run.trains_network or _optimizer(run) not in ("adamw", "adamw8bit") or run.has(*FUSED_OPTIMIZERS[1:]):
        return {}
    changes: dict[str, object] = {
        "optimizer_type": "Adafactor",
        # By default Adafactor replaces the user's learning rate.
        "optimizer_args": ["scale_parameter=False", "relative_step=False", "warmup_init=False"],
    }
    return {**changes, "use_8bit_adam": False} if run.has("use_8bit_adam") else changes


def _saves_in_finetune(run: Attempt) -> bool:
    """Return whether the run is a fine-tune whose script reads --fused_backward_pass and --full_bf16."""
    return run.family is not None and not run.trains_network and "full_bf16" not in run.family.finetune_ignores


def _fused(run: Attempt) -> Changes:
    is_fused = run.has("fused_backward_pass", RELEASE)
    return {"fused_backward_pass": True} if _saves_in_finetune(run) and not is_fused else {}


def _release(run: Attempt) -> Changes:
    has_it = run.has(RELEASE, *FUSED_OPTIMIZERS)
    return {RELEASE: True} if _saves_in_finetune(run) and not has_it else {}


def _states_on_host(run: Attempt) -> Changes:
    if not _saves_in_finetune(run) or run.has(ON_HOST):
        return {}
    fused = {name: False for name in FUSED_OPTIMIZERS if run.has(name)}
    return {**fused, RELEASE: True, ON_HOST: True}


def _pure_bf16(run: Attempt) -> Changes:
    return {"full_bf16": True} if _saves_in_finetune(run) and not run.has("full_bf16", "full_fp16") else {}


def _fp8(run: Attempt) -> Changes:
    if not run.trains_network or run.values.get("mixed_precision") not in ("bf16", "fp16"):
        return {}
    if run.has("fp8_base", "fp8_base_unet", "fp8_scaled", "base_precision"):
        return {}
    return {run.family.fp8: True} if run.family is not None and run.family.fp8 else {}


def _eight_bit_base(run: Attempt) -> Changes:
    if not run.experimental or run.has("base_precision") or run.values.get("mixed_precision") not in ("bf16", "fp16"):
        return {}
    off = {name: False for name in ("fp8_base", "fp8_base_unet", "fp8_scaled") if run.has(name)}
    if reason_to_refuse(Namespace(**{**run.values, **off}), run.script) is not None:
        return {}
    return {"base_precision": "int8", **off}


def most_swapped(run: Attempt) -> int:
    """Return the most blocks that a run can swap; 0 if it cannot."""
    if run.family is None or not run.family.usual_blocks:
        return run.family.max_blocks_to_swap if run.family is not None else 0
    return (count_blocks(run.values.get("pretrained_model_name_or_path")) or run.family.usual_blocks) - 2


def _swap(run: Attempt) -> Changes:
    most = most_swapped(run)
    now = run.number("blocks_to_swap", 0)
    if now >= most:
        return {}
    # A separate optimizer step would find trained weights in host memory.
    fused = {} if run.trains_network or run.has(*FUSED_OPTIMIZERS, RELEASE) else _fused(run)
    return {"blocks_to_swap": most // 2 if now < most // 2 else most, **fused}


def _network_only(run: Attempt) -> Changes:
    if not _trains_text_encoder(run):
        return {}
    if not run.trains_network:
        return {"train_text_encoder": False} if run.has("train_text_encoder") else {}
    frozen: Changes = {"network_train_unet_only": True}
    cached = {**frozen, "cache_text_encoder_outputs": True}
    can = run.takes("cache_text_encoder_outputs") and not run.has(*CACHED_TEXT) and run.allows(cached)
    return cached if can else frozen


def _resolution(run: Attempt) -> Changes:
    resolution = run.values.get("resolution")
    if resolution is None or run.has("dataset_config", "in_json"):
        return {}
    words = resolution if isinstance(resolution, (list, tuple)) else str(resolution).split(",")
    try:
        sides = [int(word) for word in words]
    except ValueError:
        return {}
    least = run.family.side // 2 if run.family is not None else 512
    smaller = [min(side, max(least, side * 3 // 4 // 64 * 64)) for side in sides]
    return {} if smaller == sides else {"resolution": ",".join(map(str, smaller))}


#: Every saving, cheapest first.
MEMORY_SAVINGS: tuple[MemorySaving, ...] = (
    MemorySaving(
        "attention",
        "PyTorch's memory-efficient attention",
        "nothing; it is also faster",
        exact=False,
        resumes=True,
        helps=_ACTIVATIONS | {"sampling"},
        changes=_attention,
    ),
    MemorySaving(
        "mixed precision",
        "16-bit mixed precision for activations and frozen weights",
        "8 bits of mantissa with bf16, 11 with fp16; it is also faster. SDXL's VAE needs --no_half_vae with fp16",
        exact=False,
        resumes=True,
        helps=_RESIDENT | {"caching latents", "caching text encoder outputs"},
        changes=_mixed_precision,
    ),
    MemorySaving(
        "vae batch",
        "one image at a time through the VAE while latents are cached",
        "slower caching",
        exact=False,
        resumes=True,
        helps=frozenset({"caching latents"}),
        changes=_vae_batch,
    ),
    MemorySaving(
        "text encoder batch",
        "one caption at a time through the text encoders while their outputs are cached",
        "slower caching",
        exact=False,
        resumes=True,
        helps=frozenset({"caching text encoder outputs"}),
        changes=_text_batch,
    ),
    MemorySaving(
        "cached latents",
        "latents computed once, then the VAE leaves the GPU",
        "no color augmentation and no random crops; it is also faster",
        exact=False,
        resumes=True,
        helps=TRAINING,
        changes=_latents,
    ),
    MemorySaving(
        "cached text encoder outputs",
        "captions encoded once, then the text encoders leave the GPU",
        "no caption shuffling and no caption dropout; it is also faster",
        exact=False,
        resumes=True,
        helps=_RESIDENT,
        changes=_text_encoder_outputs,
    ),
    MemorySaving(
        "cached caption variants",
        "each caption encoded in 8 variants, then the text encoders leave the GPU",
        "8 shuffles of each caption instead of another one in each step, and larger caches; it is also faster",
        exact=False,
        resumes=True,
        helps=_RESIDENT,
        changes=_caption_variants,
    ),
    MemorySaving(
        "checkpointing",
        "gradient checkpointing of every block",
        "every block's forward runs twice; about 50% more operations for a LoRA, 33% for a fine-tune",
        exact=True,
        resumes=True,
        helps=_ACTIVATIONS,
        changes=_checkpointing,
    ),
    MemorySaving(
        "recomputed attention",
        "attention of checkpointed blocks computed again in the backward pass",
        "attention's forward runs twice",
        exact=True,
        resumes=True,
        helps=_ACTIVATIONS,
        changes=_attention_again,
    ),
    MemorySaving(
        "batch",
        "a smaller batch and more accumulation steps",
        "a little speed; the effective batch stays the same",
        exact=False,
        resumes=True,
        helps=_ACTIVATIONS,
        changes=_batch,
    ),
    MemorySaving(
        "8-bit optimizer",
        "AdamW with 8-bit states",
        "rounded optimizer states; the run starts from the beginning",
        exact=False,
        resumes=False,
        helps=_RESIDENT,
        changes=_eight_bits,
    ),
    MemorySaving(
        "Adafactor",
        "Adafactor, which keeps row and column statistics instead of one state per weight",
        "a different optimizer, which may need another learning rate; the run starts from the beginning",
        exact=False,
        resumes=False,
        helps=_RESIDENT,
        changes=_adafactor,
    ),
    MemorySaving(
        "fused backward pass",
        "optimizer steps during the backward pass, so no gradient is kept",
        "gradients are clipped one by one and cannot be accumulated",
        exact=False,
        resumes=True,
        helps=frozenset({"backward", "optimizer step"}),
        changes=_fused,
    ),
    MemorySaving(
        "gradient release",
        "each weight is stepped during the backward pass, so no gradient is kept",
        "gradients are clipped by the norms of this step so far and of the last one, and cannot be accumulated",
        exact=False,
        resumes=True,
        helps=frozenset({"backward", "optimizer step"}),
        changes=_release,
    ),
    MemorySaving(
        "pure bf16",
        "weights, gradients and optimizer states in bf16",
        "updates that are small compared with the weight are lost to rounding, or with a fused backward pass or "
        "--gradient_release kept on average",
        exact=False,
        resumes=True,
        helps=_RESIDENT,
        changes=_pure_bf16,
    ),
    MemorySaving(
        "optimizer states on the host",
        "the optimizer's states in host memory, on the GPU only while their weight is stepped",
        "every step copies the states to the GPU and back",
        exact=False,
        resumes=True,
        helps=_RESIDENT,
        changes=_states_on_host,
    ),
    MemorySaving(
        "fp8 base",
        "8-bit weights for the frozen model",
        "base weights rounded to 3 bits of mantissa",
        exact=False,
        resumes=True,
        helps=_RESIDENT,
        changes=_fp8,
    ),
    MemorySaving(
        "8-bit base",
        "8-bit weights and 8-bit products for the frozen model",
        "experimental, and no GeForce GPU has run it; weights and activations rounded to 8 bits, less coarsely than by fp8",
        exact=False,
        resumes=True,
        helps=_RESIDENT,
        changes=_eight_bit_base,
    ),
    MemorySaving(
        "block swap",
        "blocks wait in host memory until they run",
        "copying time in every step, and as much host memory",
        exact=True,
        resumes=True,
        helps=_RESIDENT,
        changes=_swap,
    ),
    MemorySaving(
        "text encoders frozen",
        "no training of the text encoders",
        "the model learns no new words, only images; the run starts from the beginning",
        exact=False,
        resumes=False,
        helps=_RESIDENT,
        changes=_network_only,
    ),
    MemorySaving(
        "resolution",
        "smaller images",
        "less detail; images are trained at fewer pixels, down to half of the model's side",
        exact=False,
        resumes=True,
        helps=_ACTIVATIONS | {"caching latents"},
        changes=_resolution,
    ),
)
