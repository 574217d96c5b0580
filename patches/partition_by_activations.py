"""Exclude graph inputs from torch's partitioner, so that an activation memory budget is a fraction of the activations.

The partitioner computes ``(saved - inputs) / (saved at 1.0 - inputs)`` from *all* inputs of the graph, including parameters,
saved or not. The ratio is negative if a block's weights are larger than its activations, as with float32 weights at batch 1.
Every budget but 0 then acts as 1.0. Inputs stay in memory anyway, so saving them is free.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, Target


def _exclude_inputs(original: Any, settings: Settings) -> Any:
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


def _wanted(settings: Settings) -> bool:
    """Return whether a run may set a budget; --vram_budget sets it for compiled blocks."""
    return settings["selective_torch_compile"] or settings["activation_memory_budget"] is not None


PATCH = Patch(
    name="partition_by_activations",
    summary="count only activations in an activation memory budget; large weights at small batches no longer disable it",
    targets=(
        Target("torch._functorch.partitioners", "choose_saved_values_set", _exclude_inputs, _expect_helpers, body="runs"),
    ),
    exactness="close",
    held_to="training with a budget of 1; float32 weights within 1e-5 after the first steps",
    idea="https://pytorch.org/blog/activation-checkpointing-techniques/",
    wanted=_wanted,
)
