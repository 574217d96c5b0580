"""Compile a model's repeated blocks instead of the whole model.

What is compiled is the *class attribute*: the method inside which the work is done, so that gradient checkpointing stays
eager around it. That is independent of when models are built and LoRA is applied (nothing is traced before the first
training step), all instances share their compiled code, and no module is wrapped: state-dict keys, isinstance, pickles
and saved files are as without it.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kohya_ext.errors import UserError
from kohya_ext.loop import on_start
from kohya_ext.patching import Patch, Target
from kohya_ext.settings import Settings


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model."""

    module: str
    method: str
    classes: tuple[str, ...]


#: Every model that sd-scripts trains. Where checkpointing wraps a method from within ``forward``, it is that inner one.
BLOCKS = (
    # SD1.5 and SD2; its blocks are checkpointed from outside.
    Blocks("library.original_unet", "forward", ("BasicTransformerBlock", "ResnetBlock2D")),
    # Also SDXL's ControlNet and LLLite, which are built on them.
    Blocks(
        "library.sdxl_original_unet", "forward_body", ("BasicTransformerBlock", "ResnetBlock2D", "Downsample2D", "Upsample2D")
    ),
    Blocks("library.sd3_models", "_forward", ("MMDiTBlock",)),
    Blocks("library.flux_models", "_forward", ("DoubleStreamBlock", "SingleStreamBlock")),
    # In one piece thanks to the patch chroma_text_lengths.
    Blocks("library.chroma_models", "_forward", ("DoubleStreamBlock", "SingleStreamBlock")),
    Blocks("library.lumina_models", "_forward", ("JointTransformerBlock",)),
    Blocks("library.hunyuan_image_modules", "_forward", ("MMDoubleStreamBlock", "MMSingleStreamBlock")),
    Blocks("library.anima_models", "_forward", ("Block",)),
    # The text encoders of SD, SDXL, SD3 and FLUX, when they are trained. T5 is left out: its layers build their position
    # bias in the first one, and training it is rare.
    Blocks("transformers.models.clip.modeling_clip", "forward", ("CLIPEncoderLayer",)),
)


def _targets() -> tuple[Target, ...]:
    return tuple(
        Target(
            blocks.module,
            f"{name}.{blocks.method}",
            _compiled(blocks, name),
            _unless_a_method,
        )
        for blocks in BLOCKS
        for name in blocks.classes
    )


def _compiled(blocks: Blocks, name: str) -> Callable[[Any, Settings], Any]:
    def replace(original: Any, settings: Settings) -> Any:
        from kohya_ext.compiling.blocks import compile_method

        position = f"{blocks.classes.index(name) + 1} of {len(blocks.classes)}"
        return compile_method(original, f"{blocks.module}:{name}.{blocks.method}", position, settings)

    return replace


def _unless_a_method(original: Any) -> str | None:
    if not inspect.isfunction(original):
        return f"it is a {type(original).__name__}, not a plain method"
    if "self" not in inspect.signature(original).parameters:
        return f"its parameters are {list(inspect.signature(original).parameters)}"
    return None


# --- standing aside --------------------------------------------------------------------------------------------------


def _look_at_arguments(args: Namespace, accelerator: Any, settings: Settings) -> None:
    from kohya_ext.compiling.blocks import RUN

    reason = _reason_to_stand_aside(args)
    if reason is not None:
        RUN.stand_aside(reason)


def _reason_to_stand_aside(args: Namespace) -> str | None:
    if getattr(args, "torch_compile", False):
        return "--torch_compile compiles the whole model already; leave it out to compile the blocks"
    if getattr(args, "compile", False):
        return "sd-scripts' own --compile compiles the blocks already"
    if getattr(args, "deepspeed", False):
        return "DeepSpeed takes the model's forward over"
    if getattr(args, "split_attn", False):
        return "--split_attn cuts every sample at a length that is read from the GPU, which torch.compile cannot follow"
    return _chance_in_the_network(args)


def _chance_in_the_network(args: Namespace) -> str | None:
    """Why the network given by the user cannot be traced: what runs of it is drawn anew in every call."""
    given = dict(option.split("=", 1) for option in getattr(args, "network_args", None) or () if "=" in option)
    if getattr(args, "network_module", None) == "networks.dylora" or given.get("algo") == "dylora":
        return "DyLoRA draws the rank that it trains in every call of every layer, which cannot be compiled in one piece"
    if given.get("module_dropout", "").strip("0."):
        # As a mask it could be traced, but a layer that is left out has no gradient, a masked one a gradient of zero, and
        # Adam moves its weights by their momentum.
        return (
            "module_dropout draws in every call of every layer whether it is left out, which cannot be compiled in one piece "
            "(rank_dropout and --network_dropout can)"
        )
    return None


def _wanted(settings: Settings) -> bool:
    if settings.selective_torch_compile and settings.compile_mode in ("reduce-overhead", "max-autotune"):
        raise UserError(
            f"--compile_mode {settings.compile_mode} cannot be used with --selective_torch_compile: it records CUDA graphs, "
            "and blocks that share their code would be recorded once each, with memory of their own. Use default or "
            "max-autotune-no-cudagraphs"
        )
    return settings.selective_torch_compile


def _facts() -> Mapping[str, object]:
    from kohya_ext.compiling.blocks import RUN

    return RUN.facts()


PATCH = Patch(
    name="selective_torch_compile",
    summary="torch.compile for the repeated blocks of the U-Net, DiT and trained text encoders",
    targets=(*_targets(), *on_start(_look_at_arguments)),
    exactness="close",
    held_to="the same training without it: in float32, weights within 1e-5 after the first steps",
    idea="https://github.com/kohya-ss/sd-scripts/pull/2217",
    wanted=_wanted,
    facts=_facts,
)
