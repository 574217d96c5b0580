"""Training runs that are compared with upstream's on the virtual GPU."""

from collections.abc import Iterator
from dataclasses import dataclass

from kohya_ext.sdscripts.constraints import CASTS_WEIGHTS
from kohya_ext.tiny import arguments

_ADAFACTOR = ("--optimizer_args", "scale_parameter=False", "relative_step=False", "warmup_init=False")
OPTIMIZERS = {
    "AdamW": (),
    "AdamW8bit": (),
    "Adafactor": _ADAFACTOR,
    "Prodigy": (),
}

LORA = "sdxl_train_network.py"
FINE_TUNE = "sdxl_train.py"

RELEASE = "sdxl-finetune-release"
"""The configuration that steps weights during the backward pass, and frees their gradients."""

#: Patches that are on by default and take part in every step.
IN_EVERY_STEP = frozenset({"nan_guard", "out_of_memory", "skip_unused_gradients", "step_times"})
IN_EVERY_LORA_STEP = IN_EVERY_STEP | {"single_process_reduce", "skip_unit_scaling"}

#: The same in SDXL with gradient checkpointing.
IN_EVERY_SDXL_STEP = IN_EVERY_STEP | {"nonreentrant_checkpointing"}
IN_EVERY_SDXL_LORA_STEP = IN_EVERY_LORA_STEP | IN_EVERY_SDXL_STEP


@dataclass(frozen=True)
class Configuration:
    """A run of a script, and what the extension's run has in addition."""

    script: str
    options: tuple[str, ...] = ()
    family: str | None = None
    extension_options: tuple[str, ...] = ()
    reached: frozenset[str] = frozenset()
    """Patches and other files of the extension whose code must run in a step."""
    adds_work: bool = False
    """Whether the extension's options need launches or memory of their own."""

    @property
    def accumulation(self) -> int:
        """The number of forward passes in an optimizer step."""
        name = "--gradient_accumulation_steps"
        return int(self.options[self.options.index(name) + 1]) if name in self.options else 1

    @property
    def saves(self) -> bool:
        """Whether the script saves within the recorded steps."""
        return "--save_every_n_steps" in self.options


def _named() -> Iterator[tuple[str, Configuration]]:
    snr = ("--min_snr_gamma", "5")
    yield "sdxl-lora-bf16", Configuration(LORA, ("--mixed_precision", "bf16"), reached=IN_EVERY_SDXL_LORA_STEP)
    with_snr = IN_EVERY_SDXL_LORA_STEP | {"snr_lookup"}
    yield "sdxl-lora-fp16", Configuration(LORA, ("--mixed_precision", "fp16", *snr), reached=with_snr)
    hooked = IN_EVERY_LORA_STEP | {"fast_checkpoint_hooks", "skip_gradient_norms"}
    for precision in ("bf16", "fp16"):
        mixed = ("--mixed_precision", precision)
        yield f"flux-lora-{precision}", Configuration("flux_train_network.py", mixed, reached=hooked)
    mixed = ("--mixed_precision", "bf16")
    fused = ("--fused_backward_pass", "--optimizer_type", "Adafactor", *_ADAFACTOR)
    yield "sdxl-finetune-fused", Configuration(FINE_TUNE, (*mixed, *fused), reached=IN_EVERY_SDXL_STEP)

    whole = (*mixed, "--full_bf16", "--optimizer_type", "AdamW", "--max_grad_norm", "0")
    released = IN_EVERY_SDXL_STEP | {"gradient_release"}
    yield RELEASE, Configuration(FINE_TUNE, whole, None, ("--gradient_release",), released, adds_work=True)

    for name, (options, reached) in _EXTENSION_OPTIONS.items():
        of_step = IN_EVERY_STEP | reached
        yield name, Configuration(LORA, mixed, extension_options=options, reached=of_step, adds_work=True)
    for name, options in _SCRIPT_OPTIONS.items():
        yield name, Configuration(LORA, (*mixed, *options))
    for script, trained in arguments.SCRIPTS.items():
        for family in trained:
            for optimizer, options in OPTIMIZERS.items():
                kind = ("--optimizer_type", optimizer, *options)
                for precision in ("bf16", "fp16"):
                    whole = ("--full_fp16",) if precision == "fp16" and script in CASTS_WEIGHTS else ()
                    name = f"{script.removesuffix('.py')}-{family}-{optimizer}-{precision}"
                    yield name, Configuration(script, ("--mixed_precision", precision, *whole, *kind), family)


#: Name -> options of the extension, and the patches or files whose code they run in a step.
_EXTENSION_OPTIONS = {
    "adaptive-lr": (("--adaptive_lr",), {"adaptive_lr"}),
    "ema": (("--ema", "--ema_decay", "0.99"), {"ema"}),
    "fused-operations": (("--fused_operations",), {"fused_operations"}),
    "compiled": (("--selective_torch_compile",), {"kohya_ext/compiling/blocks"}),
    "vram-budget": (("--vram_budget", "12GB"), {"vram_budget"}),
    "on-oom": (("--on_oom", "retry"), set()),
    "checkpointing-ratio": (("--gradient_checkpointing_ratio", "0.5"), set()),
}

_SCRIPT_OPTIONS = {
    "without-clipping": ("--max_grad_norm", "0"),
    "accumulation": ("--gradient_accumulation_steps", "2"),
    "weight-norms": ("--scale_weight_norms", "1"),
    "tracking": ("--log_with", "tensorboard", "--logging_dir", "logs"),
    "saving": ("--save_every_n_steps", "2"),
    "validation": ("--validation_split", "0.5", "--validate_every_n_steps", "2", "--max_validation_steps", "1"),
}

CONFIGURATIONS = dict(_named())

#: Mark -> generation -> its configurations; the others are slow. CI's two generations together cover both precisions.
MARKS = {
    "default": {"newest": ("sdxl-lora-bf16",)},
    "thorough": {"newest": ("flux-lora-fp16", RELEASE), "oldest": ("sdxl-lora-fp16", "sdxl-finetune-fused")},
}
