"""Set the activation memory budget of torch.compile's partitioner, and count only activations in it.

Compiled blocks save only a share of their activations and recompute the cheapest ones in backward. Gradient checkpointing
recomputes everything. Use one or the other: a checkpointed block frees its activations anyway, so a budget only makes it
recompute them twice.
"""

from __future__ import annotations

from argparse import Namespace
from functools import wraps
from typing import Any

from kohya_ext.compiling.budget import set_budget
from kohya_ext.config.settings import Option, Settings, fraction
from kohya_ext.console import note, warn
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, Target
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


def _exclude_inputs(original: Any, settings: Settings) -> Any:
    """Exclude graph inputs from torch's partitioner, so that a budget is a fraction of the activations.

    The partitioner computes ``(saved - inputs) / (saved at 1.0 - inputs)`` from *all* inputs of the graph, including
    parameters, saved or not. The ratio is negative if a block's weights are larger than its activations, as with float32
    weights at batch 1. Every budget but 0 then acts as 1.0. Inputs stay in memory anyway, so saving them is free.
    https://pytorch.org/blog/activation-checkpointing-techniques/
    """
    import torch._functorch.partitioners as partitioners

    @wraps(original)
    def choose_saved_values_set(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
        if memory_budget in (0, 1):
            return original(joint_graph, node_info, memory_budget)
        inputs = frozenset(node_info.inputs)
        size_of, solve_min_cut = partitioners._size_of, partitioners.solve_min_cut

        def size_beyond_inputs(node: Any) -> Any:
            return 0 if node in inputs else size_of(node)

        def with_true_sizes(*args: Any, **kwargs: Any) -> Any:
            with replaced(partitioners, "_size_of", size_of):
                return solve_min_cut(*args, **kwargs)

        with replaced(partitioners, "_size_of", size_beyond_inputs), replaced(partitioners, "solve_min_cut", with_true_sizes):
            return original(joint_graph, node_info, memory_budget)

    return choose_saved_values_set


def _expect_helpers(original: Any) -> str | None:
    import torch._functorch.partitioners as partitioners

    missing = [name for name in ("_size_of", "solve_min_cut") if not hasattr(partitioners, name)]
    return f"its module lacks {', '.join(missing)}" if missing else None


def _set(args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
    share = settings[ACTIVATION_MEMORY_BUDGET]
    if share is None:
        return
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
    summary="limit the share of activations that compiled blocks save for backward; large weights do not disable the limit",
    targets=(
        Target("torch._functorch.partitioners", "choose_saved_values_set", _exclude_inputs, _expect_helpers, body="runs"),
    ),
    options=(ACTIVATION_MEMORY_BUDGET,),
    torch="2.6",
    exactness="close",
    held_to="training with a budget of 1; float32 weights within 1e-5 after the first steps",
    idea="https://github.com/kohya-ss/sd-scripts/pull/2217",
    # --vram_budget sets a budget for compiled blocks, too.
    wanted=lambda settings: settings["selective_torch_compile"] or settings[ACTIVATION_MEMORY_BUDGET] is not None,
    stage=Stage.COMPUTE,
    on_start=_set,
)
