"""Let the partitioner of torch.compile trade recompute for memory.

What is compiled keeps only a share of its activations and recomputes the rest in backward, the cheapest first, where
gradient checkpointing recomputes everything. It is the alternative to checkpointing, not an addition: inside a checkpoint
nothing outlives the block anyway, and what the budget makes it recompute is recomputed twice.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kohya_ext.compiling.budget import set_budget
from kohya_ext.config.settings import Option, Settings, fraction
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage

ACTIVATION_MEMORY_BUDGET = Option[float | None](
    "activation_memory_budget",
    None,
    fraction,
    "share of the activations that compiled blocks may keep for backward, from 0 (recompute all) to 1 (keep all)",
    environment="SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET",
    metavar="FRACTION",
    activates=True,
)


def _set(args: Namespace, accelerator: Any, settings: Settings) -> None:
    share = settings[ACTIVATION_MEMORY_BUDGET]
    assert share is not None, "wanted without a value"
    whole_model = getattr(args, "torch_compile", False) or getattr(args, "compile", False)
    if not whole_model and not settings["selective_torch_compile"]:
        warn(f"--activation_memory_budget {share} does nothing without --selective_torch_compile (or --torch_compile)")
        return
    if not whole_model and settings["compile_backend"] == "eager":
        warn(f"--activation_memory_budget {share} does nothing with --compile_backend eager, which partitions no graph")
        return
    if share < 1 and getattr(args, "gradient_checkpointing", False):
        warn(
            f"--activation_memory_budget {share} saves nothing with --gradient_checkpointing and recomputes twice: "
            "use one of them (--no-gradient_checkpointing turns the other off)"
        )
    try:
        set_budget(share)
    except Exception as error:  # torch's internals differ between versions; training goes on with what it has
        warn(f"this torch takes no activation memory budget: {type(error).__name__}: {error}")
        return
    note(f"compiled blocks keep {share:.0%} of their activations" if share else "compiled blocks recompute all activations")


PATCH = Patch(
    name="activation_memory_budget",
    summary="what compiled blocks keep for backward, as a share of their activations",
    targets=(),
    options=(ACTIVATION_MEMORY_BUDGET,),
    exactness="close",
    held_to="the same training with a budget of 1: in float32, weights within 1e-5 after the first steps",
    idea="https://github.com/kohya-ss/sd-scripts/pull/2217",
    wanted=lambda settings: settings[ACTIVATION_MEMORY_BUDGET] is not None,
    stage=Stage.COMPUTE,
    on_start=_set,
)
