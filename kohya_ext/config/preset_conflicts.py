"""Preset values that give way to the user's other options.

A preset fills what is open. A value that it would fill can contradict one that the user gave for another option: a cached text
encoder is not trained, a cached caption is not shuffled, Adafactor's arguments are no other optimizer's. Such a value is left
out. Each rule is an assertion or an error of sd-scripts, or an option that it would ignore without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Family

#: Says whether the user's value of an option contradicts; the second argument holds all other options' values.
Condition = Callable[[object, Mapping[str, object]], bool]


@dataclass(frozen=True)
class Rule:
    """Preset keys that are left out when the user set one of some options."""

    keys: tuple[str, ...]
    options: tuple[str, ...]
    when: Condition
    holds_for: Callable[[Family, str], bool] | None = None
    """Given the model family and the script's file name; None: it holds for every script, known or not."""
    costs_memory: bool = True
    """Whether a run needs more memory without a key that saves some."""

    def is_for(self, script: str, family: Family | None) -> bool:
        """Whether it holds for a script, which trains a family."""
        return self.holds_for is None or (family is not None and self.holds_for(family, script))

    def applies(self, given: Mapping[str, object], filled: Mapping[str, object]) -> str | None:
        """Return the option that contradicts, with its value, if one does."""
        for option in (option for option in self.options if option in given):
            others = {**_DEFAULTS, **filled, **{key: value for key, value in given.items() if key != option}}
            if self.when(given[option], others):
                return f"{option} = {given[option]}"
        return None


def _is_set(value: object, others: Mapping[str, object]) -> bool:
    return any(item not in (0, None, "") for item in (value if isinstance(value, list) else [value]))


def _trains_text(value: object, others: Mapping[str, object]) -> bool:
    return _is_set(value, others) and not others.get("network_train_unet_only")


def _is_off(value: object, others: Mapping[str, object]) -> bool:
    return not value


def _is_other_optimizer(value: object, others: Mapping[str, object]) -> bool:
    return str(value).lower() != str(others.get("optimizer_type")).lower()


def _accumulates(value: object, others: Mapping[str, object]) -> bool:
    return isinstance(value, (int, float)) and value > 1


def _takes_no_warmup(value: object, others: Mapping[str, object]) -> bool:
    return value == "constant" or str(value).startswith("adafactor")


def _is_not_bf16(value: object, others: Mapping[str, object]) -> bool:
    return value != "bf16"


def _trains_t5(value: object, others: Mapping[str, object]) -> bool:
    return any(str(item).lower() == "train_t5xxl=true" for item in (value if isinstance(value, list) else [value]))


def _has_no_buckets(value: object, others: Mapping[str, object]) -> bool:
    """Whether a resolution is outside of the sizes that buckets may have: upstream ends in an assertion."""
    try:
        sides = [int(side) for side in (value if isinstance(value, list) else str(value).split(","))]
        smallest, largest = (int(str(others.get(key))) for key in ("min_bucket_reso", "max_bucket_reso"))
    except ValueError:
        return False
    return min(sides) < smallest or max(sides) > largest


_CACHED_TEXT = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
_CACHED_LATENTS = ("cache_latents", "cache_latents_to_disk")
_FUSED_STEPS = ("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")
_OLD_OPTIMIZER_SWITCHES = ("use_8bit_adam", "use_lion_optimizer")
_UNTRAINED_TEXT = ("network_train_unet_only",)

_CHANGING_CAPTIONS = ("shuffle_caption", "caption_tag_dropout_rate", "token_warmup_step")
_CAPTION_DROPOUT = ("caption_dropout_rate", "caption_dropout_every_n_epochs")
_CHANGING_IMAGES = ("color_aug", "random_crop")

_TEXT_RATES = ("text_encoder_lr", "network_train_text_encoder_only")

#: Upstream's defaults of what a condition looks at.
_DEFAULTS: Mapping[str, object] = {"min_bucket_reso": 256, "max_bucket_reso": 1024}


def _trains_or_caches(family: Family, script: str) -> bool:
    """Whether a script trains its text encoders or caches the outputs of all of them, one or the other."""
    return family.trains_text_encoders and not family.caches_t5_alone


def _network_trains_or_caches(family: Family, script: str) -> bool:
    return script == family.lora and _trains_or_caches(family, script)


RULES = (
    # FLUX and SD3 train CLIP while T5's outputs stay cached. HunyuanImage's text encoders are never trained.
    Rule(_UNTRAINED_TEXT, _TEXT_RATES, _is_set, lambda family, script: family.trains_text_encoders),
    Rule(_CACHED_TEXT, _TEXT_RATES, _trains_text, _trains_or_caches),
    Rule(_CACHED_TEXT, _UNTRAINED_TEXT, _is_off, _network_trains_or_caches),
    Rule(_CACHED_TEXT, ("train_text_encoder",), _is_set),
    Rule((*_CACHED_TEXT, *_UNTRAINED_TEXT), ("network_args",), _trains_t5, lambda family, script: family.caches_t5_alone),
    Rule(_CACHED_TEXT, ("train_t5xxl",), _is_set),
    Rule(_CACHED_TEXT, (*_CHANGING_CAPTIONS, "weighted_captions"), _is_set),
    Rule(_CACHED_TEXT, _CAPTION_DROPOUT, _is_set, lambda family, script: not family.caches_empty_caption),
    Rule(_CACHED_LATENTS, (*_CHANGING_IMAGES, "train_inpainting"), _is_set),
    Rule(("enable_bucket",), ("resolution",), _has_no_buckets),
    Rule(("sdpa",), ("xformers", "mem_eff_attn"), _is_set, costs_memory=False),
    Rule(("gradient_checkpointing_ratio",), ("gradient_checkpointing",), _is_off),
    Rule(("blocks_to_swap",), ("cpu_offload_checkpointing", "unsloth_offload_checkpointing"), _is_set),
    Rule(("persistent_data_loader_workers",), ("max_data_loader_n_workers",), _is_off),
    Rule(("full_bf16",), ("mixed_precision",), _is_not_bf16),
    Rule(("full_bf16",), ("full_fp16",), _is_set),
    Rule(("fp8_base", "fp8_base_unet"), ("mixed_precision",), lambda value, others: value == "no"),
    # An optimizer's arguments, its clipping and its fused steps belong to it alone.
    Rule(("optimizer_args", "max_grad_norm", "fused_backward_pass"), ("optimizer_type",), _is_other_optimizer),
    Rule(("optimizer_type", "optimizer_args", "max_grad_norm", "fused_backward_pass"), _OLD_OPTIMIZER_SWITCHES, _is_set),
    Rule(("fused_backward_pass",), _FUSED_STEPS[1:], _is_set),
    Rule(("fused_backward_pass",), ("gradient_accumulation_steps",), _accumulates),
    Rule(("gradient_accumulation_steps",), _FUSED_STEPS, _is_set),
    Rule(("lr_warmup_steps",), ("lr_scheduler",), _takes_no_warmup),
    Rule(("lr_warmup_steps",), ("lr_scheduler_type",), _is_set),
)

#: What a run needs more memory without.
SAVES_MEMORY = frozenset(
    {
        *(*_CACHED_TEXT, *_CACHED_LATENTS, *_UNTRAINED_TEXT, "blocks_to_swap", "fp8_base", "fp8_scaled", "fp8_vl", "full_bf16"),
        *("fused_backward_pass", "gradient_checkpointing", "sdpa", "text_encoder_cpu"),
    }
)


@dataclass(frozen=True)
class Reason:
    """Why a preset's value is left out."""

    words: str
    costs_memory: bool
    in_gui: bool = False
    """Off on the GUI's form, where it can be turned on."""


def held_back(
    script: str,
    filled: Mapping[str, object],
    given: Mapping[str, object],
    subsets: Sequence[Mapping[str, object]] = (),
    off_in_gui: Collection[str] = (),
) -> dict[str, Reason]:
    """Return the preset keys that are left out, each with the reason.

    ``filled``: the values that the preset sets. ``given``: the user's own, of the config file and the command line.
    ``subsets``: the options of each subset of a dataset config. ``off_in_gui``: options that the GUI's form shows as off.
    """
    said = {**dict.fromkeys(off_in_gui, False), **given}
    left = {key: value for key, value in filled.items() if key not in given or key in off_in_gui}
    reasons: dict[str, Reason] = {}
    family = families.of(script, {**filled, **given})
    for rule in (rule for rule in RULES if rule.is_for(script, family)):
        for key in [key for key in rule.keys if left.get(key, False) is not False]:
            others = {key: value for key, value in filled.items() if key not in reasons}
            against = next(filter(None, (rule.applies({**said, **where}, others) for where in subsets or [{}])), None)
            if against is not None:
                reasons[key] = Reason(against, rule.costs_memory and key in SAVES_MEMORY)
                del left[key]
    for key in [key for key, value in left.items() if value and key in off_in_gui]:
        reasons[key] = Reason("off in the GUI", key in SAVES_MEMORY, in_gui=True)
        del left[key]
    return reasons


def in_words(label: str, filled: Mapping[str, object], reasons: Mapping[str, Reason]) -> str:
    """Return one line: what a preset filled, what it left out and why. A switch that it leaves off is not worth a word."""
    words = [key if value is True else f"{key}={value}" for key, value in filled.items() if value is not False]
    line = f"preset {label} set {', '.join(words) or 'nothing'}"
    if not reasons:
        return line
    grouped: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        grouped.setdefault(reason.words, []).append(key)
    line += "; left out " + "; ".join(f"{', '.join(keys)} ({words})" for words, keys in grouped.items())
    if any(reason.costs_memory for reason in reasons.values()):
        line += ". The run needs more memory than the preset is made for"
        if ticks := [key for key, reason in reasons.items() if reason.costs_memory and reason.in_gui]:
            line += f": turn on {', '.join(ticks)} in the GUI if it does not fit"
    return line
