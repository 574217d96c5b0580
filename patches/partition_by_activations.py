"""Make torch's partitioner weigh activations only, so that an activation memory budget means a share of them.

It measures ``(saved - inputs) / (saved at 1.0 - inputs)``, with *all* inputs of the graph, parameters included, whether they
are saved or not. Where the weights of a block are larger than its activations (float32 weights at batch 1, for example) that is
negative, and every budget but 0 is taken for 1.0. Inputs cost nothing: they stay in memory anyway.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, Target


def _without_inputs(original: Any, settings: Settings) -> Any:
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


def _unless_it_weighs(original: Any) -> str | None:
    import torch._functorch.partitioners as partitioners

    missing = [name for name in ("_size_of", "solve_min_cut") if not hasattr(partitioners, name)]
    return f"its module lacks {', '.join(missing)}" if missing else None


def _wanted(settings: Settings) -> bool:
    """Any run that may set a budget: --vram_budget does for compiled blocks."""
    return settings["selective_torch_compile"] or settings["activation_memory_budget"] is not None


PATCH = Patch(
    name="partition_by_activations",
    summary="an activation memory budget is a share of activations; float32 weights at batch 1 no longer make it do nothing",
    targets=(
        Target("torch._functorch.partitioners", "choose_saved_values_set", _without_inputs, _unless_it_weighs, body="runs"),
    ),
    exactness="close",
    held_to="the same training with a budget of 1: in float32, weights within 1e-5 after the first steps",
    idea="https://pytorch.org/blog/activation-checkpointing-techniques/",
    wanted=_wanted,
)
