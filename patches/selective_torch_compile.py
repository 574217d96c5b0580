"""Compile a model's repeated blocks instead of the whole model.

The patch compiles a *class attribute*: the method that does the work, so that gradient checkpointing around it stays eager.
Models may be built and LoRA applied before or after, because tracing starts at the first training step. All instances share
compiled code. Modules are not wrapped, so state-dict keys, isinstance, pickles and saved files are unchanged.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kohya_ext.compiling.configuration import autotune_in_own_memory, skip_guard_timing
from kohya_ext.compiling.graph_breaks import (
    TRANSLATORS,
    allow_deletions,
    keep_source_of_methods,
    lacks_deletions,
    loses_methods,
)
from kohya_ext.compiling.inputs import Inputs
from kohya_ext.compiling.lowering import accept_scaled_products
from kohya_ext.compiling.support import reason_not_to_compile
from kohya_ext.config.settings import Option, Settings, boolean, one_of
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage, data_sets, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.sdscripts.fingerprints import known_bodies
from kohya_ext.speed import switches

SELECTIVE_TORCH_COMPILE = Option(
    "selective_torch_compile",
    None,
    boolean,
    "compile the model's repeated blocks instead of the whole model (default: see --speed)",
    environment="SDSCRIPTS_SELECTIVE_TORCH_COMPILE",
    activates=True,
)
COMPILE_MODE = Option(
    "compile_mode",
    "default",
    one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    "torch.compile's mode for the blocks: default or max-autotune-no-cudagraphs",
    metavar="MODE",
)
COMPILE_DYNAMIC = Option(
    "compile_dynamic",
    "auto",
    one_of("auto", "true", "false"),
    "one graph for images of all sizes (true), one per size (false), or one for all from the second size on (auto)",
    metavar="auto|true|false",
)


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model."""

    module: str
    method: str
    classes: Mapping[str, Inputs]
    without_sd_scripts: bool = False


#: Dimensions that vary, in a transformer block and in a convolution of a U-Net.
_TOKENS, _IMAGE = (1,), (2, 3)

_UNET_LAYER = Inputs({"hidden_states": _TOKENS}, ("hidden_states",))

#: Family -> class -> the inputs of its blocks that vary between calls. Other classes compile too, with one more graph for the
#: first block and one for a second image size.
INPUTS: Mapping[str, Mapping[str, Inputs]] = {
    # SD1.5 and SD2, whose blocks are checkpointed by their callers.
    "sd15": {"BasicTransformerBlock": _UNET_LAYER, "ResnetBlock2D": Inputs({"input_tensor": _IMAGE})},
    # SDXL's ControlNet and LLLite use these classes too. Downsample2D and Upsample2D stay eager: as single convolutions they
    # would add four graphs and save a few thousandths of a step's bytes (the cast around an upsampling).
    "sdxl": {"BasicTransformerBlock": _UNET_LAYER, "ResnetBlock2D": Inputs({"x": _IMAGE})},
    "sd3": {"MMDiTBlock": Inputs({"x": _TOKENS}, ("x", "context"))},
    "flux": {
        "DoubleStreamBlock": Inputs({"img": _TOKENS, "pe": (2,)}, ("img", "txt")),
        "SingleStreamBlock": Inputs({"x": _TOKENS, "pe": (2,)}, ("x",)),
    },
    # The patch chroma_text_lengths avoids graph breaks. Text lengths vary with the captions.
    "chroma": {
        "DoubleStreamBlock": Inputs({"img": _TOKENS, "txt": _TOKENS, "pe": (2,)}, ("img", "txt")),
        "SingleStreamBlock": Inputs({"x": _TOKENS, "pe": (2,)}, ("x",)),
    },
    # Text lengths vary with the captions; the same class refines the text.
    "lumina": {"JointTransformerBlock": Inputs({"x": _TOKENS, "x_mask": _TOKENS, "pe": _TOKENS}, ("x",))},
    "hunyuan-image": {
        "MMDoubleStreamBlock": Inputs({"img": _TOKENS, "txt": _TOKENS, "freqs_cis": (0,)}, ("img", "txt")),
        "MMSingleStreamBlock": Inputs({"x": _TOKENS, "freqs_cis": (0,)}, ("x",)),
    },
    "anima": {"Block": Inputs({"x_B_T_H_W_D": _IMAGE, "rope_emb_L_1_1_D": (0,)}, ("x_B_T_H_W_D",))},
}

#: Classes that are compiled only with a budget below 1, or with --vram_budget, which sets one in the run. A budget applies to
#: compiled blocks alone; others would keep all their activations. Compiling SDXL's 12 widths of ResnetBlock2D took 91 of 110 s
#: on an H100, and shortened a step on the GPU by 4% (benchmarks/README.md).
_ONLY_WITH_BUDGET = frozenset({"ResnetBlock2D"})

#: The compiled blocks. If ``forward`` checkpoints an inner method, the inner method is compiled.
BLOCKS = (
    *(
        Blocks(
            family.blocks.module,
            family.blocks.method,
            {name: INPUTS.get(family.name, {}).get(name, Inputs()) for name in family.blocks.classes},
        )
        for family in FAMILIES
    ),
    # The trained text encoders of SD, SDXL, SD3 and FLUX. T5 is left out, because its first layer builds the position bias of
    # all layers and it is rarely trained.
    Blocks("transformers.models.clip.modeling_clip", "forward", {"CLIPEncoderLayer": Inputs(activations=("hidden_states",))}),
    # The U-Net of the demo, which runs without sd-scripts: the innermost classes in the model's list of repeated blocks
    # (``_repeated_blocks``, or ``_no_split_modules`` before diffusers 0.34).
    Blocks("diffusers.models.attention", "forward", {"BasicTransformerBlock": Inputs()}, True),
    Blocks("diffusers.models.resnet", "forward", {"ResnetBlock2D": Inputs()}, True),
)


def _targets() -> tuple[Target, ...]:
    return tuple(
        Target(
            blocks.module,
            f"{name}.{blocks.method}",
            _compiled(blocks, name),
            _expect_method,
            wanted=partial(_is_compiled, name),
            without_sd_scripts=blocks.without_sd_scripts,
            body="runs",
        )
        for blocks in BLOCKS
        for name in blocks.classes
    )


def _is_compiled(name: str, settings: Settings) -> bool:
    budget = settings["activation_memory_budget"]
    has_budget = budget < 1 if budget is not None else settings["vram_budget"] is not None
    return name not in _ONLY_WITH_BUDGET or has_budget


def _works(blocks: Blocks, settings: Settings) -> Callable[[], bool]:
    """Return a function that returns whether blocks are compiled now. ``--speed`` chooses only those of the trained models."""
    is_given = bool(settings[SELECTIVE_TORCH_COMPILE])
    may_be_chosen = blocks.module in {family.blocks.module for family in FAMILIES}
    return switches.works(switches.COMPILED_BLOCKS, settings) if may_be_chosen else lambda: is_given


def _compiled(blocks: Blocks, name: str) -> Callable[[Any, Settings], Any]:
    def replace(original: Any, settings: Settings) -> Any:
        from kohya_ext.compiling.blocks import compile_method

        compiled = [each for each in blocks.classes if _is_compiled(each, settings)]
        position = f"{compiled.index(name) + 1} of {len(compiled)}"
        label = f"{blocks.module}:{name}.{blocks.method}"
        return compile_method(original, label, position, settings, blocks.classes[name], _works(blocks, settings))

    return replace


def _expect_method(original: Any) -> str | None:
    if not inspect.isfunction(original):
        return f"it is a {type(original).__name__}, not a plain method"
    if "self" not in inspect.signature(original).parameters:
        return f"its parameters are {list(inspect.signature(original).parameters)}"
    return None


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
    from kohya_ext.compiling.blocks import RUN

    checkout = program().checkout
    RUN.begin(partial(data_sets, accelerator), checkout.commit if checkout is not None else None)
    if not settings[SELECTIVE_TORCH_COMPILE]:
        return  # --speed decides
    reason = reason_not_to_compile(args)
    if reason is not None:
        RUN.disable(reason)


def _facts() -> Mapping[str, object]:
    from kohya_ext.compiling.blocks import RUN

    return RUN.facts()


_COMPILER = (
    Target(
        "torch._dynamo.variables.nn_module",
        "UnspecializedNNModuleVariable.var_getattr",
        keep_source_of_methods,
        takes("self", "tx", "name", exactly=True),
        body=known_bodies({"4640a6a879dd": "2.6"}, package="torch"),
        needed=loses_methods,
    ),
    *(
        Target(
            "torch._dynamo.symbolic_convert",
            f"{translator}.dispatch_table",
            allow_deletions,
            body="runs",
            needed=lacks_deletions,
        )
        for translator in TRANSLATORS
    ),
    Target(
        "torch._inductor.fx_passes.quantization",
        "_is_valid_woq_optimization_pattern",
        accept_scaled_products,
        optional=True,
        body="runs",
    ),
    # The function only measures statistics, so any body may be skipped.
    Target("torch._dynamo.guards", "profile_guard_manager", skip_guard_timing, optional=True, body="runs"),
    Target(
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner.benchmark_all_configs",
        autotune_in_own_memory,
        optional=True,
        body="runs",
    ),
)

PATCH = Patch(
    name="selective_torch_compile",
    summary="compile the repeated blocks of the U-Net, DiT and trained text encoders",
    targets=(*_targets(), *_COMPILER),
    options=(SELECTIVE_TORCH_COMPILE, COMPILE_MODE, COMPILE_DYNAMIC),
    torch="2.6",
    exactness="close",
    held_to="training without the patch; float32 weights within 1e-5 after the first steps",
    idea="https://github.com/kohya-ss/sd-scripts/pull/2217",
    wanted=partial(switches.is_wanted, switches.COMPILED_BLOCKS),
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
