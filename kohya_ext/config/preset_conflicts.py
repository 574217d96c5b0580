"""Hold back preset values that contradict the user's options.

A preset only sets options that the user does not set, but its values can still contradict the user's other options. For
example, a cached text encoder cannot be trained, and cached captions cannot be shuffled. What sd-scripts cannot run with is in
its table of constraints; the rules here are about options that it silently ignores, or that express a preference.

Some values only have a meaning together: a preset's alpha suits its rank. A preset sets such a group only if the user sets
nothing of it (:data:`GROUPS`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kohya_ext.sdscripts import families, networks
from kohya_ext.sdscripts.constraints import (
    CACHED_LATENTS,
    CACHED_TEXT,
    CONSTRAINTS,
    KEEPS_CACHE,
    MASTERS,
    ON_HOST,
    ON_HOST_RATIO,
    RELEASE,
    VARIANTS,
    Constraint,
)
from kohya_ext.sdscripts.families import Family

#: (user's value of an option, values of all other options) -> whether it contradicts the preset.
Condition = Callable[[object, Mapping[str, object]], bool]


@dataclass(frozen=True)
class Rule:
    """Preset keys that are held back when the user sets one of some options."""

    keys: tuple[str, ...]
    options: tuple[str, ...]
    when: Condition
    holds_for: Callable[[Family, str], bool] | None = None
    """(model family, script's file name) -> whether the rule holds; None means every script, known or not."""
    consequence: str = ""
    """Follows the user's option in messages."""

    def contradicting(self, key: str, script: str, filled: Mapping[str, object], user: Mapping[str, object]) -> str | None:
        """Return the user's option that contradicts the preset's value of ``key``, or None."""
        if key not in self.keys or not any(option in user for option in self.options):
            return None
        family = families.of(script, {**filled, **user})
        if self.holds_for is not None and (family is None or not self.holds_for(family, script)):
            return None
        for option in (option for option in self.options if option in user):
            others = {**_DEFAULTS, **filled, **{key: value for key, value in user.items() if key != option}}
            if self.when(user[option], others):
                return option
        return None


def _is_given(value: object, others: Mapping[str, object]) -> bool:
    return True


def _is_set(value: object, others: Mapping[str, object]) -> bool:
    return any(item not in (0, None, "") for item in (value if isinstance(value, list) else [value]))


def _trains_text(value: object, others: Mapping[str, object]) -> bool:
    return _is_set(value, others) and not others.get("network_train_unet_only")


def _needs_no_cache(value: object, others: Mapping[str, object]) -> bool:
    return _is_set(value, others) and not others.get(VARIANTS)


def _is_off(value: object, others: Mapping[str, object]) -> bool:
    return not value


def _is_other_optimizer(value: object, others: Mapping[str, object]) -> bool:
    return str(value).lower() != str(others.get("optimizer_type")).lower()


def _has_other_rates(value: object, others: Mapping[str, object]) -> bool:
    return str(value).lower() not in _RATES_OF_ADAM


def _has_no_rank(value: object, others: Mapping[str, object]) -> bool:
    return networks.meaning_of_dim(value, others.get("network_args")) is not None


def _names_no_optimizer(value: object, others: Mapping[str, object]) -> bool:
    return _is_set(value, others) and "optimizer_type" not in others


def _is_other_resolution(value: object, others: Mapping[str, object]) -> bool:
    """Return whether a resolution is not the preset's, in any notation: ``1024``, ``"1024,1024"``, ``[1024, 1024]``."""
    return _sides(value) != _sides(others.get("resolution"))


def _sides(resolution: object) -> list[str]:
    sides = [str(side).strip() for side in (resolution if isinstance(resolution, list) else str(resolution).split(","))]
    return sides * 2 if len(sides) == 1 else sides


def _trains_t5(value: object, others: Mapping[str, object]) -> bool:
    return any(str(item).lower() == "train_t5xxl=true" for item in (value if isinstance(value, list) else [value]))


def _has_no_buckets(value: object, others: Mapping[str, object]) -> bool:
    """Return whether a resolution is outside the bucket limits, on which an assertion of upstream fails."""
    try:
        sides = [int(side) for side in (value if isinstance(value, list) else str(value).split(","))]
        smallest, largest = (int(str(others.get(key))) for key in ("min_bucket_reso", "max_bucket_reso"))
    except ValueError:
        return False
    return min(sides) < smallest or max(sides) > largest


_OLD_OPTIMIZER_SWITCHES = ("use_8bit_adam", "use_lion_optimizer")
_UNTRAINED_TEXT = ("network_train_unet_only",)

_CAPTION_DROPOUT = ("caption_dropout_rate", "caption_dropout_every_n_epochs")

_TEXT_RATES = ("text_encoder_lr", "network_train_text_encoder_only")

_RANK = ("network_dim", "network_alpha")
_BUCKET_LIMITS = ("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale")
_SCHEDULERS = ("lr_scheduler", "lr_scheduler_type")
_SHAPES_OF_SCHEDULES = ("lr_scheduler_args", "lr_scheduler_num_cycles", "lr_scheduler_power", "lr_decay_steps")

#: Optimizers with the same learning rates: their steps are about as long as the rate, whatever the gradients' size.
_RATES_OF_ADAM = ("adamw", "adamw8bit", "pagedadamw", "pagedadamw8bit", "pagedadamw32bit", "adafactor")

#: Upstream's defaults of options that conditions read.
_DEFAULTS: Mapping[str, object] = {"min_bucket_reso": 256, "max_bucket_reso": 1024}


def _trains_or_caches(family: Family, script: str) -> bool:
    """Return whether a script either trains its text encoders or caches the outputs of all of them."""
    return family.trains_text_encoders and not family.caches_t5_alone


#: Keys that a preset sets together. If the user sets one of a rule's options, sd-scripts' defaults apply to its keys.
#:
#: A learning rate alone does not change the optimizer, nor a number of warmup steps the scheduler: sd-scripts' default
#: scheduler rejects warmup, and its default optimizer needs four times the memory of a fine-tuning preset's.
GROUPS = (
    Rule(_RANK, _RANK, _is_given),
    Rule(_RANK, ("dim_from_weights",), _is_set),
    Rule(_RANK, ("network_module",), _has_no_rank, consequence="its dimension is not a rank"),
    Rule(_BUCKET_LIMITS, _BUCKET_LIMITS, _is_given),
    Rule(_BUCKET_LIMITS, ("resolution",), _is_other_resolution),
    Rule(("optimizer_args", "max_grad_norm", "fused_backward_pass"), ("optimizer_type",), _is_other_optimizer),
    Rule(("learning_rate",), ("optimizer_type",), _has_other_rates, consequence="set its --learning_rate"),
    Rule(("learning_rate",), ("use_lion_optimizer",), _is_set, consequence="set its --learning_rate"),
    Rule(("optimizer_type", "optimizer_args", "max_grad_norm", "fused_backward_pass"), _OLD_OPTIMIZER_SWITCHES, _is_set),
    Rule(("optimizer_type",), ("optimizer_args",), _is_set),
    Rule(("max_grad_norm", "fused_backward_pass"), ("optimizer_args",), _names_no_optimizer),
    Rule(("lr_warmup_steps", *_SHAPES_OF_SCHEDULES), _SCHEDULERS, _is_set),
    Rule(("lr_scheduler",), ("lr_scheduler_type",), _is_set),
)

RULES = (
    *GROUPS,
    # FLUX and SD3 train CLIP while T5's outputs stay cached. HunyuanImage's text encoders are never trained.
    Rule(_UNTRAINED_TEXT, _TEXT_RATES, _is_set, lambda family, script: family.trains_text_encoders),
    Rule(CACHED_TEXT, _TEXT_RATES, _trains_text, _trains_or_caches),
    Rule(
        CACHED_TEXT,
        _UNTRAINED_TEXT,
        _is_off,
        lambda family, script: script == family.lora and _trains_or_caches(family, script),
    ),
    Rule(CACHED_TEXT, ("train_text_encoder",), _is_set),
    Rule((*CACHED_TEXT, *_UNTRAINED_TEXT), ("network_args",), _trains_t5, lambda family, script: family.t5_tokens > 0),
    Rule(CACHED_TEXT, ("train_t5xxl",), _is_set),
    Rule(CACHED_TEXT, _CAPTION_DROPOUT, _needs_no_cache, lambda family, script: not family.caches_empty_caption, KEEPS_CACHE),
    Rule(
        ("enable_bucket",),
        ("resolution",),
        _has_no_buckets,
        consequence="outside the bucket limits; set --enable_bucket, --min_bucket_reso and --max_bucket_reso for it",
    ),
    Rule(("sdpa",), ("xformers", "mem_eff_attn"), _is_set),
    Rule(("gradient_checkpointing_ratio", "keep_attention"), ("gradient_checkpointing",), _is_off),
    Rule(("keep_attention",), ("vram_budget",), _is_set),
    Rule((ON_HOST, MASTERS), (RELEASE,), _is_off),
    Rule((ON_HOST_RATIO,), (ON_HOST, RELEASE), _is_off),
    Rule(("persistent_data_loader_workers",), ("max_data_loader_n_workers",), _is_off),
)

#: Preset keys without which a run needs more memory.
SAVES_MEMORY = frozenset(
    {
        *(*CACHED_TEXT, *CACHED_LATENTS, *_UNTRAINED_TEXT, "blocks_to_swap", "fp8_base", "fp8_scaled", "fp8_vl", "full_bf16"),
        *("fused_backward_pass", "gradient_checkpointing", "sdpa", "text_encoder_cpu"),
    }
)

#: Keys that a rule holds back for an option which saves as much.
_REPLACED = frozenset({"sdpa"})


@dataclass(frozen=True)
class Reason:
    """Why a preset value is held back."""

    text: str
    costs_memory: bool
    in_gui: bool = False
    """Whether the option is off in the GUI's form, where the user can turn it on."""


def held_back(
    script: str,
    filled: Mapping[str, object],
    given: Mapping[str, object],
    subsets: Sequence[Mapping[str, object]] = (),
    off_in_gui: Collection[str] = (),
) -> dict[str, Reason]:
    """Return the preset keys that are held back, with the reasons.

    ``filled``: the preset's values. ``given``: the user's values from the config file and the command line. ``subsets``: the
    options of each subset in a dataset config. ``off_in_gui``: options that the GUI's form shows as off.
    """
    user = {**dict.fromkeys(off_in_gui, False), **given}
    left = {key: value for key, value in filled.items() if key not in given or key in off_in_gui}
    reasons: dict[str, Reason] = {}
    rules: tuple[Rule | Constraint, ...] = (*RULES, *CONSTRAINTS)
    users = [{**user, **subset} for subset in subsets or [{}]]
    kept = dict(filled)
    for rule in rules:
        for key in [key for key, value in left.items() if value is not False]:
            conflict = _conflict(rule, key, script, kept, users)
            if conflict is not None:
                reasons[key] = Reason(conflict, key in SAVES_MEMORY - _REPLACED)
                del left[key], kept[key]
    for key in [key for key, value in left.items() if value and key in off_in_gui]:
        reasons[key] = Reason("off in the GUI", key in SAVES_MEMORY, in_gui=True)
        del left[key]
    return reasons


def _conflict(
    rule: Rule | Constraint, key: str, script: str, filled: Mapping[str, object], users: Sequence[Mapping[str, object]]
) -> str | None:
    """Return the option and value, of the run or a subset, that contradict the preset's value of ``key``, or None."""
    for user in users:
        option = rule.contradicting(key, script, filled, user)
        if option is not None:
            return f"{option} = {user[option]}{rule.consequence and f': {rule.consequence}'}"
    return None


def summary(label: str, filled: Mapping[str, object], reasons: Mapping[str, Reason]) -> str:
    """Return a line with the values that a preset set, and those held back with reasons. Switches set to off are omitted."""
    values = [key if value is True else f"{key}={value}" for key, value in filled.items() if value is not False]
    line = f"preset {label} set {', '.join(values) or 'nothing'}"
    if not reasons:
        return line
    grouped: dict[str, list[str]] = {}
    for key, reason in reasons.items():
        grouped.setdefault(reason.text, []).append(key)
    line += "; skipped " + "; ".join(f"{', '.join(keys)} ({text})" for text, keys in grouped.items())
    if any(reason.costs_memory for reason in reasons.values()):
        line += ". The run needs more memory than the preset is designed for"
        if switches := [key for key, reason in reasons.items() if reason.costs_memory and reason.in_gui]:
            line += f"; if it does not fit, turn on {', '.join(switches)} in the GUI"
    if any(reason.in_gui for reason in reasons.values()):
        names = label.partition(" (")[0].replace(" + ", " ")
        line += f". To fill in the GUI's form: python -m kohya_ext presets export {names} --for kohya_ss"
    return line
