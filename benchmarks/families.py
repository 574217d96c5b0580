"""Scripts and arguments that benchmarks train with, at full size and reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """One kind of training with the usual settings for speed: cached latents and text encoder outputs, bf16, SDPA."""

    script: str
    models: str
    """The family of the tiny models for reduced runs."""
    arguments: tuple[str, ...]
    full: tuple[str, ...] = ("--resolution", "1024,1024", "--mixed_precision", "bf16")
    reduced: tuple[str, ...] = ("--resolution", "256,256", "--mixed_precision", "no")
    """Most CPUs emulate bf16, so reduced runs use fp32."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Size of the reduced model in the model step, where a tiny model would measure only Python; see ``worker.ready``."""


_CACHED = ("--sdpa", "--cache_latents", "--cache_text_encoder_outputs")
_LORA = ("--network_train_unet_only", "--network_dim", "16", "--network_alpha", "16", "--learning_rate", "1e-4")
_ADAMW = ("--optimizer_type", "AdamW")
_UNET = {"width": 96}
_FLOW = ("--model_prediction_type", "raw", "--timestep_sampling", "sigmoid")


def _lora(module: str, *more: str) -> tuple[str, ...]:
    return (*_CACHED, *_LORA, *_ADAMW, "--network_module", module, *more)


FAMILIES: Mapping[str, Family] = {
    "sdxl-lora": Family(
        "sdxl_train_network.py", "sdxl", _lora("networks.lora", "--no_half_vae"), shape=_UNET
    ),
    "sdxl-finetune": Family(
        "sdxl_train.py",
        "sdxl",
        (*_CACHED, "--no_half_vae", "--learning_rate", "1e-5", "--max_grad_norm", "0", "--optimizer_type", "Adafactor",
         "--optimizer_args", "scale_parameter=False", "relative_step=False", "warmup_init=False"),
        full=("--resolution", "1024,1024", "--mixed_precision", "bf16", "--full_bf16"),
        shape=_UNET,
    ),
    "lumina-lora": Family("lumina_train_network.py", "lumina", _lora("networks.lora_lumina", *_FLOW)),
    "flux-lora": Family("flux_train_network.py", "flux", _lora("networks.lora_flux", *_FLOW, "--guidance_scale", "1")),
    "sd15-lora": Family(
        "train_network.py",
        "sd15",
        # This script caches no text encoder outputs.
        tuple(word for word in _lora("networks.lora") if word != "--cache_text_encoder_outputs"),
        full=("--resolution", "512,512", "--mixed_precision", "bf16"),
        shape=_UNET,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Recipe:
    """The command line of a variant."""

    meaning: str
    arguments: tuple[str, ...]
    patched: bool = True
    """False: upstream, without the extension in its process."""
    patches: tuple[str, ...] = ()
    """The variant is left out when one of these is missing in ``patches/``."""


_CHECKPOINTING = ("--gradient_checkpointing",)
_COMPILED = ("--selective_torch_compile",)
_SELECTIVE = ("selective_torch_compile",)


def _budget(share: float) -> Recipe:
    return Recipe(
        f"selective compile, budget {share:g}",
        (*_COMPILED, "--activation_memory_budget", f"{share:g}"),
        patches=(*_SELECTIVE, "activation_memory_budget"),
    )


def _share(share: float) -> dict[str, Recipe]:
    """Return recipes that checkpoint a part of the blocks, eager and compiled."""
    chosen, patch = (*_CHECKPOINTING, "--gradient_checkpointing_ratio", f"{share:g}"), "selective_checkpointing"
    return {
        f"share-{share:g}": Recipe(f"patched, eager, checkpointing {share:.0%} of the blocks", chosen, patches=(patch,)),
        f"compiled-share-{share:g}": Recipe(
            f"selective compile, checkpointing {share:.0%} of the blocks", (*chosen, *_COMPILED), patches=(*_SELECTIVE, patch)
        ),
    }


RECIPES: Mapping[str, Recipe] = {
    "upstream": Recipe("upstream, checkpointing", _CHECKPOINTING, patched=False),
    "patched": Recipe("patched, eager, checkpointing", _CHECKPOINTING),
    "fused": Recipe(
        "patched, eager, fused operations, checkpointing",
        (*_CHECKPOINTING, "--fused_operations"),
        patches=("fused_operations",),
    ),
    "compiled": Recipe("selective compile, checkpointing", (*_CHECKPOINTING, *_COMPILED), patches=_SELECTIVE),
    "traced": Recipe(
        "selective compile's guards alone (backend eager), checkpointing",
        (*_CHECKPOINTING, *_COMPILED, "--compile_backend", "eager"),
        patches=_SELECTIVE,
    ),
    "upstream-compile": Recipe(
        "upstream's --torch_compile (accelerate: the whole model), checkpointing",
        (*_CHECKPOINTING, "--torch_compile"),
        patched=False,
    ),
    "upstream-free": Recipe("upstream, no checkpointing", (), patched=False),
    "compiled-free": Recipe("selective compile, no checkpointing", _COMPILED, patches=_SELECTIVE),
    "upstream-compile-free": Recipe(
        "upstream's --torch_compile (accelerate: the whole model), no checkpointing", ("--torch_compile",), patched=False
    ),
    **{f"budget-{share:g}": _budget(share) for share in (0.9, 0.75, 0.5, 0.25, 0.1, 0.0)},
    **{name: recipe for share in (0.75, 0.5, 0.25) for name, recipe in _share(share).items()},
}

STEP = ("upstream", "patched", "fused", "compiled", "budget-0.5", "upstream-free", "compiled-free")
COMPILE = ("upstream-compile", "compiled", "patched")


def arguments(family: Family, reduced: bool, recipe: Recipe | None = None, *more: str) -> list[str]:
    """Return the command line of a variant, without models, images and output; the last value of an option counts."""
    size = family.reduced if reduced else family.full
    return [*family.arguments, *size, *(recipe.arguments if recipe else ()), *more]
