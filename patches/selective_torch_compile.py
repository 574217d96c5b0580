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

from kohya_ext.compiling.support import reason_to_stand_aside
from kohya_ext.errors import UserError
from kohya_ext.loop import on_start
from kohya_ext.patching import Patch, Target
from kohya_ext.sdscripts import KNOWN_LAYOUTS, Layout
from kohya_ext.settings import Settings


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model."""

    module: str
    method: str
    classes: tuple[str, ...]
    layouts: frozenset[Layout] = KNOWN_LAYOUTS


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
    # The demo's U-Net where there is no sd-scripts: of the model's own list of repeated blocks (``_repeated_blocks``, before
    # diffusers 0.34 ``_no_split_modules``) those that hold no other of it.
    Blocks("diffusers.models.attention", "forward", ("BasicTransformerBlock",), frozenset({"unknown"})),
    Blocks("diffusers.models.resnet", "forward", ("ResnetBlock2D",), frozenset({"unknown"})),
)


def _targets() -> tuple[Target, ...]:
    return tuple(
        Target(
            blocks.module,
            f"{name}.{blocks.method}",
            _compiled(blocks, name),
            _unless_a_method,
            blocks.layouts,
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

    reason = reason_to_stand_aside(args)
    if reason is not None:
        RUN.stand_aside(reason)


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
