"""The table of option combinations that sd-scripts cannot run with, or silently ignores.

Each constraint is an assertion or an error of upstream's scripts, most of which upstream reaches only after loading the model.
Preflight reports the broken constraints of a run, a preset holds back values that break one with the user's options, and
``plan`` and the out-of-memory advice offer no change that breaks one. This module uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.families import Family

CACHED_TEXT = ("cache_text_encoder_outputs", "cache_text_encoder_outputs_to_disk")
CACHED_LATENTS = ("cache_latents", "cache_latents_to_disk")

#: Options that step the optimizer during the backward pass, so that no gradient is kept.
FUSED_OPTIMIZERS = ("fused_backward_pass", "fused_optimizer_groups", "blockwise_fused_optimizers")

RELEASE = "gradient_release"
"""The extension's option that steps each weight of any optimizer during the backward pass."""

ON_HOST = "optimizer_states_on_host"
ON_HOST_RATIO = "optimizer_states_on_host_ratio"
"""The extension's option that keeps the optimizer's states in host memory; it needs :data:`RELEASE`."""

MASTERS = "master_weights"
"""The extension's option that keeps what bf16 weights lack of float32 ones; it needs :data:`RELEASE`."""

CHANGING_CAPTIONS = ("shuffle_caption", "caption_tag_dropout_rate")

VARIANTS = "cached_caption_variants"
"""The extension's option that caches variants of captions, so that these can change although they are cached."""

PRESERVATION = "output_preservation"
"""The extension's option that holds a LoRA's output on class captions to the base model's."""

CHANGING_IMAGES = ("color_aug", "random_crop")

#: Scripts that cast the weights they train to the type of --mixed_precision. PyTorch's gradient scaler refuses fp16 weights,
#: which upstream changes with --full_fp16 alone.
CASTS_WEIGHTS = ("flux_train.py", "flux_train_control_net.py", "lumina_train.py", "sdxl_train_control_net_lllite.py")

#: Options of old releases that choose an optimizer.
OLD_OPTIMIZER_SWITCHES = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}

#: Starts of the names of optimizers whose step depends on the gradients of all weights.
_WHOLE_STEPS = ("prodigy", "dadapt")

#: Networks that look for the classes of the models they know.
_DETECTING = ("networks.loha", "networks.lokr")


class Settings(Protocol):
    """The extension's options by name."""

    def __getitem__(self, name: str) -> object: ...


def stepping_in_backward(args: object, settings: Settings | None = None) -> str | None:
    """Return the option of a run that steps the optimizer during the backward pass; None if there is none.

    ``settings``: the extension's, if the arguments do not have them.
    """
    if settings is not None and settings[RELEASE]:
        return RELEASE
    return next((name for name in (*FUSED_OPTIMIZERS, RELEASE) if getattr(args, name, None)), None)


def is_schedule_free(values: Mapping[str, object]) -> bool:
    """Return whether upstream ignores the scheduler and its arguments."""
    name = str(values.get("optimizer_type") or "").lower()
    return name.endswith("schedulefree") or bool(values.get("optimizer_schedulefree_wrapper"))


@dataclass(frozen=True)
class Run:
    """A run's script and arguments, and the facts about them that constraints read."""

    script: str
    """The script's file name."""
    values: Mapping[str, object]
    """Arguments by key; a missing key has upstream's default."""

    def given(self, names: Iterable[str]) -> list[str]:
        """Return the names of arguments whose values are not None, False, 0 or empty."""
        return [name for name in names if self.values.get(name)]

    def has(self, *names: str) -> bool:
        """Return whether any of these arguments has a true value."""
        return bool(self.given(names))

    def without(self, names: Iterable[str]) -> Run:
        """Return the run without some arguments."""
        return Run(self.script, {key: value for key, value in self.values.items() if key not in names})

    @property
    def family(self) -> Family | None:
        """The family that the script trains; None for an unknown script."""
        return families.of(self.script, self.values)

    @property
    def trains_network(self) -> bool:
        """Whether the script trains a LoRA or another network."""
        return "network" in self.script

    @property
    def freezes_cached_text(self) -> bool:
        """Whether a text encoder whose outputs are cached cannot be trained.

        FLUX and SD3 train CLIP while T5's outputs are cached. Lumina 2's text encoder runs in spite of the cache if trained.
        """
        trains = self.family is not None and (self.family.caches_t5_alone or self.family.name == "lumina")
        return self.trains_network and not trains

    @property
    def drops_cached_captions(self) -> bool:
        """Whether captions can be dropped although their outputs are cached."""
        return self.has(VARIANTS) or (self.family is not None and self.family.caches_empty_caption)

    @property
    def is_sdxl(self) -> bool:
        """Whether the script trains SDXL."""
        return self.family is not None and self.family.name == "sdxl"

    @property
    def swaps_trained(self) -> bool:
        """Whether swapped blocks are trained."""
        return self.family is not None and self.script in self.family.finetune and self.family.max_blocks_to_swap > 0

    @property
    def offloads(self) -> bool:
        """Whether the script can keep checkpoints in host memory."""
        return self.family is None or self.script != self.family.lora or self.family.offloads_checkpoints

    @property
    def bucket_steps(self) -> int:
        """The divisor of --bucket_reso_steps that the script requires."""
        return 1 if self.family is None else self.family.bucket_steps[self.script != self.family.lora]

    @property
    def bucket_rest(self) -> int:
        """The remainder of --bucket_reso_steps; 0 where it is a multiple of the divisor."""
        return int(str(self.values.get("bucket_reso_steps") or self.bucket_steps)) % self.bucket_steps

    @property
    def precision(self) -> str:
        """The value of --mixed_precision."""
        return str(self.values.get("mixed_precision", "no"))

    @property
    def has_bf16_weights(self) -> bool:
        """Whether the trained weights of a fine-tune are bf16."""
        ignores = self.family is not None and "full_bf16" in self.family.finetune_ignores
        return (self.has("full_bf16") and not ignores) or (self.precision == "bf16" and self.script in CASTS_WEIGHTS)

    @property
    def accumulation(self) -> int:
        """The value of --gradient_accumulation_steps."""
        return int(str(self.values.get("gradient_accumulation_steps") or 1))

    @property
    def starts_later(self) -> bool:
        """Whether the first step or epoch is not that of the training set: a first step overrules a first epoch."""
        step, epoch = self.values.get("initial_step"), self.values.get("initial_epoch")
        return int(str(epoch or 1)) > 1 if step is None else int(str(step)) > 0

    @property
    def processes(self) -> int:
        """The value of --num_processes."""
        return int(str(self.values.get("num_processes") or 1))

    @property
    def uses_adafactor(self) -> bool:
        """Whether the optimizer is Adafactor."""
        return str(self.values.get("optimizer_type")).lower() == "adafactor"

    @property
    def optimizer(self) -> str:
        """The optimizer's class, without its module."""
        older = next((name for switch, name in OLD_OPTIMIZER_SWITCHES.items() if self.has(switch)), None)
        return str(self.values.get("optimizer_type") or older or "AdamW").rpartition(".")[2]

    @property
    def fine_tunes(self) -> bool:
        """Whether the script trains the weights of a whole model."""
        return self.family is not None and self.script in self.family.finetune

    @property
    def has_relative_steps(self) -> bool:
        """Whether Adafactor sets its own rates, as by default, which replaces the schedule of ``lr_scheduler``."""
        given = self.key_values("optimizer_args")
        relative = given.get("relative_step") != "False" or given.get("warmup_init") == "True"
        return self.uses_adafactor and relative and not self.has("lr_scheduler_type") and not is_schedule_free(self.values)

    @property
    def lacks_huber_schedule(self) -> bool:
        """Whether the schedule of a Huber loss, by default that of signal-to-noise ratios, is for U-Nets only."""
        is_huber = self.values.get("loss_type") in ("huber", "smooth_l1")
        is_snr = self.values.get("huber_schedule", "snr") == "snr"
        schedules = self.family is not None and not self.family.unet and (self.trains_network or self.fine_tunes)
        return is_huber and is_snr and schedules

    @property
    def scheduler(self) -> str:
        """The schedule that upstream uses."""
        return str(self.values.get("lr_scheduler_type") or self.values.get("lr_scheduler"))

    @property
    def refuses_warmup(self) -> bool:
        """Whether warmup steps are an error with the schedule."""
        fixed = self.has("lr_scheduler_type") or self.scheduler == "constant" or self.scheduler.startswith("adafactor")
        return fixed and not self.has_relative_steps and not is_schedule_free(self.values)

    @property
    def network(self) -> str:
        """The module of the network that is trained."""
        return str(self.values.get("network_module") or "")

    def key_values(self, name: str) -> dict[str, str]:
        """Return the values of an option that takes ``key=value``."""
        given = self.values.get(name)
        words = given if isinstance(given, (list, tuple)) else [given] if given else []
        return {name: value for name, _, value in (str(word).partition("=") for word in words)}

    @property
    def is_detected(self) -> bool:
        """Whether upstream's LoHa and LoKr know the script's model."""
        return self.family is None or self.family.detected_by_lycoris

    @property
    def stops_text_encoder(self) -> bool:
        """Whether the run reaches the step from which on the text encoder is not trained."""
        stop, steps = self.values.get("stop_text_encoder_training"), self.values.get("max_train_steps")
        ends_later = self.has("max_train_epochs") or steps is None or int(str(stop or 0)) < int(str(steps))
        return stop is not None and int(str(stop)) >= 0 and ends_later


Condition = Callable[[Run], object]


@dataclass(frozen=True)
class Constraint:
    """A combination of arguments that a script cannot run with."""

    options: tuple[str, ...]
    """The options that it is about; the run itself where empty."""
    others: tuple[str, ...]
    """The options that they exclude or need."""
    condition: Condition
    """Whether a run in which one of ``options`` is set breaks it."""
    message: str
    """The reason and the way out. Its fields: ``option``, which has a message for each one that is set; ``first``, the first of
    them; ``other``, the first of ``others`` that is set; and ``run``."""
    of_subset: bool = False
    """Whether a subset of a --dataset_config has its own values."""
    consequence: str = ""
    """Follows the user's option where a preset's value is held back."""

    def is_broken(self, run: Run) -> bool:
        """Return whether a run's arguments break it."""
        return (not self.options or run.has(*self.options)) and bool(self.condition(run))

    def problems(self, run: Run) -> list[str]:
        """Return the messages for a run; none where it is not broken."""
        if not self.is_broken(run):
            return []
        given, other = run.given(self.options) or [""], next(iter(run.given(self.others)), "")
        messages = (self.message.format(option=name, first=given[0], other=other, run=run) for name in given)
        return list(dict.fromkeys(messages))

    def contradicting(self, key: str, script: str, filled: Mapping[str, object], user: Mapping[str, object]) -> str | None:
        """Return the user's option that contradicts the preset's value of ``key``; None if dropping the value mends nothing."""
        its, theirs = (self.options, self.others) if key in self.options else (self.others, self.options)
        given = [name for name in theirs if name in user]
        if key not in its or not given:
            return None
        run = Run(script, {**filled, **user})
        if not self.is_broken(run) or self.is_broken(run.without({*its} - {*user})):
            return None
        return max(given, key=lambda name: bool(user[name]))


def newly_broken(run: Run, changes: Mapping[str, object]) -> bool:
    """Return whether changes to a run's arguments break a constraint that the run does not break."""
    changed = Run(run.script, {**run.values, **changes})
    return any(constraint.is_broken(changed) and not constraint.is_broken(run) for constraint in CONSTRAINTS)


def _excludes(
    options: tuple[str, ...],
    others: tuple[str, ...],
    because: str,
    when: Condition = lambda run: True,
    of_subset: bool = False,
    consequence: str = "",
) -> Constraint:
    """Return the constraint that options cannot be combined with others."""
    message = f"--{{other}} and --{{option}} cannot be combined: {because}"
    return Constraint(options, others, lambda run: run.has(*others) and when(run), message, of_subset, consequence)


_RELEASE = (RELEASE, ON_HOST, MASTERS)
_IN_BACKWARD = (*FUSED_OPTIMIZERS, *_RELEASE)
_BLOCKS, _PRECISION, _SCHEDULE = ("blocks_to_swap",), ("mixed_precision",), ("lr_scheduler", "lr_scheduler_type")
_UNET_ONLY, _OPTIMIZER, _WARMUP = ("network_train_unet_only",), ("optimizer_type",), ("lr_warmup_steps",)
_OFFLOADED = ("cpu_offload_checkpointing", "unsloth_offload_checkpointing")
_IS_FROZEN = "a text encoder whose outputs are cached cannot be trained"
_IS_FIXED = f"the caption is encoded once, so it cannot change; --{VARIANTS} 8 caches 8 variants of it"
KEEPS_CACHE = f"--{VARIANTS} 8 would keep it"
_NO_WARMUP = "--{option} is an error with --lr_scheduler {run.scheduler}; remove it"

# fmt: off
CONSTRAINTS: tuple[Constraint, ...] = (
    _excludes(CHANGING_CAPTIONS, CACHED_TEXT, _IS_FIXED, lambda run: not run.has(VARIANTS), True, KEEPS_CACHE),
    _excludes(("token_warmup_step",), CACHED_TEXT, "the caption would depend on the step", of_subset=True),
    _excludes(("caption_dropout_rate",), CACHED_TEXT, _IS_FIXED, lambda run: not run.drops_cached_captions, True, KEEPS_CACHE),
    _excludes(CHANGING_IMAGES, CACHED_LATENTS, "the latents are computed once", of_subset=True),
    _excludes(("weighted_captions",), CACHED_TEXT, "upstream does not support it"),
    Constraint(CACHED_TEXT, (), lambda run: run.freezes_cached_text and not run.has(*_UNET_ONLY),
               f"--{{first}} needs --network_train_unet_only: {_IS_FROZEN}"),
    _excludes(("train_text_encoder",), CACHED_TEXT, _IS_FROZEN, lambda run: run.is_sdxl and not run.trains_network),
    _excludes(("train_inpainting",), CACHED_LATENTS, "every step draws another mask"),
    _excludes(("network_train_text_encoder_only",), _UNET_ONLY, "nothing would be trained"),
    _excludes(FUSED_OPTIMIZERS[1:], FUSED_OPTIMIZERS[:1], "choose one"),
    _excludes(_OFFLOADED, _BLOCKS, "upstream does not support it"),
    _excludes(_OFFLOADED[1:], _OFFLOADED[:1], "choose one"),
    Constraint(FUSED_OPTIMIZERS[:1], _OPTIMIZER, lambda run: not run.uses_adafactor,
               "--{option} works with --optimizer_type Adafactor only; --gradient_release works with others"),
    Constraint(_BLOCKS, _IN_BACKWARD, lambda run: run.swaps_trained and not run.has(*_IN_BACKWARD),
               "{run.script} fails at its first step with --{option}, because the optimizer finds weights in host memory; add "
               "--fused_backward_pass, which needs --optimizer_type Adafactor, or --gradient_release"),
    Constraint(_IN_BACKWARD, ("gradient_accumulation_steps",), lambda run: run.accumulation > 1,
               "--{option} and --gradient_accumulation_steps {run.accumulation} cannot be combined: no gradient is kept"),
    # No preset's value is held back for it: the processes that are started do not have --num_processes.
    Constraint(_IN_BACKWARD, (), lambda run: run.processes > 1,
               "--{option} steps before the processes have averaged their gradients, so each would train its own weights; "
               "remove it or use one process"),
    Constraint(("skip_until_initial_step",), ("gradient_accumulation_steps",),
               lambda run: run.starts_later and run.accumulation > 1,
               "--{option} with --gradient_accumulation_steps {run.accumulation} begins in a later epoch than that of the "
               "first step, and numbers its steps from below 0; remove --{option}. To resume a run, use --resume without "
               "--initial_step and --initial_epoch"),
    Constraint(_RELEASE, (), lambda run: not run.fine_tunes,
               "--{option} works with the scripts that fine-tune whole models, not with {run.script}; remove it"),
    _excludes(_RELEASE, FUSED_OPTIMIZERS, "each steps the optimizer during the backward pass; remove --{other}"),
    _excludes(_RELEASE, ("deepspeed",), "DeepSpeed steps its own optimizer"),
    Constraint(_RELEASE, _PRECISION, lambda run: run.precision == "fp16",
               "--{option} needs --mixed_precision bf16 or no: with fp16 the gradients are scaled until all are known"),
    Constraint(_RELEASE, _OPTIMIZER, lambda run: run.optimizer.lower().startswith(_WHOLE_STEPS),
               "--{option} cannot be combined with --optimizer_type {run.optimizer}, whose step depends on the gradients of "
               "all weights; use AdamW, AdamW8bit or Adafactor"),
    Constraint((MASTERS,), ("full_bf16",), lambda run: not run.has_bf16_weights,
               "--{option} is for bf16 weights, and {run.script} would train float32 ones; remove it, or use --full_bf16 "
               "--mixed_precision bf16 with a script that reads them"),
    Constraint((MASTERS,), _OPTIMIZER, lambda run: is_schedule_free(run.values),
               "--{option} cannot be combined with --optimizer_type {run.optimizer}, which changes the weights between steps"),
    Constraint(_OFFLOADED[:1], (), lambda run: run.has("gradient_checkpointing") and not run.offloads,
               "--{option} fails with a TypeError in {run.script}; remove it"),
    Constraint(_WARMUP, (*_OPTIMIZER, "optimizer_args"), lambda run: run.has_relative_steps,
               "--{option} is an error with Adafactor's relative steps, which replace the schedule; remove it, or add "
               "--optimizer_args relative_step=False"),
    Constraint(_WARMUP, _SCHEDULE, lambda run: run.refuses_warmup and run.scheduler == "constant",
               f"{_NO_WARMUP} or use constant_with_warmup"),
    Constraint(_WARMUP, _SCHEDULE, lambda run: run.refuses_warmup and run.scheduler != "constant", _NO_WARMUP),
    Constraint(("enable_bucket",), (), lambda run: run.bucket_rest,
               "--bucket_reso_steps must be a multiple of {run.bucket_steps} for {run.script}"),
    Constraint(("full_bf16",), _PRECISION, lambda run: run.precision != "bf16",
               "--{option} needs --mixed_precision bf16, not {run.precision}"),
    Constraint(("full_fp16",), _PRECISION, lambda run: run.precision != "fp16",
               "--{option} needs --mixed_precision fp16, not {run.precision}"),
    Constraint((), (), lambda run: run.precision == "fp16" and run.script in CASTS_WEIGHTS and not run.has("full_fp16"),
               "{run.script} fails at its first step with --mixed_precision fp16; use --mixed_precision bf16, or add "
               "--full_fp16"),
    Constraint(("fp8_base", "fp8_base_unet"), _PRECISION, lambda run: run.precision == "no",
               "--{option} needs --mixed_precision bf16 or fp16"),
    Constraint(("save_state", "save_state_on_train_end"), (), lambda run: run.script.endswith("_leco.py"),
               "{run.script} does not read --{option}; use --save_state_every_n_minutes"),
    Constraint(("adaptive_noise_scale",), (), lambda run: not run.has("noise_offset"), "--{option} needs --noise_offset"),
    Constraint(("scale_v_pred_loss_like_noise_pred",), (), lambda run: not run.has("v_parameterization"),
               "--{option} needs --v_parameterization"),
    _excludes(("v_parameterization",), ("v_pred_like_loss",), "the model predicts v already"),
    _excludes(("pretrained_model_name_or_path",), ("v2",), "SDXL has no v2", lambda run: run.is_sdxl),
    Constraint((PRESERVATION,), (), lambda run: not run.trains_network,
               "--{option} works with the scripts that train LoRAs, not with {run.script}; remove it"),
    Constraint((PRESERVATION,), ("network_module",), lambda run: run.network == "networks.dylora",
               "--{option} cannot be combined with networks.dylora, which ignores its multiplier and so cannot be left out"),
    _excludes((PRESERVATION,), ("deepspeed",), "DeepSpeed's engine counts every backward pass"),
    Constraint(("network_module",), (), lambda run: run.network in _DETECTING and not run.is_detected,
               "--{option} {run.network} fails in {run.script}, because it supports SDXL and Anima only; use "
               "lycoris.kohya with --network_args algo=loha or algo=lokr"),
    Constraint(("network_args",), ("network_module",),
               lambda run: run.network == "networks.lora_flux" and run.key_values("network_args").get("split_qkv") == "True",
               "--{option} split_qkv=True ends {run.network} with a ValueError; remove it"),
    Constraint((), (), lambda run: run.script == "train_db.py" and run.stops_text_encoder,
               "--stop_text_encoder_training ends train_db.py with a TypeError at that step; remove it, or use -1, which "
               "trains the U-Net alone"),
    Constraint((), (), lambda run: run.script == "sdxl_train_control_net_lllite_old.py",
               "{run.script} fails at its first step, because it is older than the rest of sd-scripts; use "
               "sdxl_train_control_net_lllite.py"),
    Constraint((), (), lambda run: run.scheduler.startswith("adafactor") and not run.uses_adafactor,
               "--lr_scheduler adafactor works with --optimizer_type Adafactor only"),
    Constraint((), (), lambda run: run.scheduler == "adafactor" and run.uses_adafactor and not run.has_relative_steps,
               "--lr_scheduler adafactor ends with an IndexError with --optimizer_args relative_step=False; remove either"),
    Constraint(("loss_type",), ("huber_schedule",), lambda run: run.lacks_huber_schedule,
               "{run.script} fails at its first step with a Huber --{option} and --huber_schedule snr, which is for U-Nets; "
               "add --huber_schedule constant"),
)
# fmt: on
