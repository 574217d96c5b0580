"""Set the activation memory budget of torch.compile's partitioner.

Compiled blocks save only a share of their activations and recompute the cheapest ones in backward. Gradient checkpointing
recomputes everything. Use one or the other: a checkpointed block frees its activations anyway, so a budget only makes it
recompute them twice.
"""

from __future__ import annotations

from argparse import Namespace

from kohya_ext.compiling.budget import set_budget
from kohya_ext.config.settings import Option, Settings, fraction
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator

ACTIVATION_MEMORY_BUDGET = Option[float | None](
    "activation_memory_budget",
    None,
    fraction,
    "share of activations that compiled blocks save for backward, from 0 (recompute all) to 1 (save all)",
    environment="SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET",
    metavar="FRACTION",
    activates=True,
)


def _set(args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
    share = settings[ACTIVATION_MEMORY_BUDGET]
    assert share is not None, "the patch is on without a value"
    whole_model = getattr(args, "torch_compile", False) or getattr(args, "compile", False)
    if not whole_model and not settings["selective_torch_compile"]:
        warn(f"--activation_memory_budget {share} has no effect; add --selective_torch_compile or --torch_compile")
        return
    if share < 1 and getattr(args, "gradient_checkpointing", False):
        warn(
            f"--activation_memory_budget {share} saves nothing with --gradient_checkpointing and recomputes activations twice; "
            "remove one of them (--no-gradient_checkpointing overrides a preset)"
        )
    try:
        set_budget(share)
    except Exception as error:  # internal API: training continues without a budget
        warn(f"--activation_memory_budget ignored: this version of torch rejects it ({type(error).__name__}: {error})")
        return
    note(f"compiled blocks save {share:.0%} of their activations" if share else "compiled blocks recompute all activations")


PATCH = Patch(
    name="activation_memory_budget",
    summary="limit the share of activations that compiled blocks save for backward",
    targets=(),
    options=(ACTIVATION_MEMORY_BUDGET,),
    exactness="close",
    held_to="training with a budget of 1; float32 weights within 1e-5 after the first steps",
    idea="https://github.com/kohya-ss/sd-scripts/pull/2217",
    wanted=lambda settings: settings[ACTIVATION_MEMORY_BUDGET] is not None,
    stage=Stage.COMPUTE,
    on_start=_set,
)
