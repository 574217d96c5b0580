"""The activation memory budget of torch's partitioner, set where it counts and made to mean what it says.

``activation_memory_budget`` is the share of a compiled graph's activations that may be kept for backward; the rest is
recomputed, the cheapest first. https://pytorch.org/blog/activation-checkpointing-techniques/

It is a flight of stairs. The partitioner has three plans of its own (what is fastest; the same with every cheap chain made
again; the same with everything but products and attention made again) and takes the first one that is below the budget,
however far: from just above that plan's own share to just below the one before, all budgets are one. Only below the third
plan's share it weighs single products against each other. ``python -m kohya_ext budget`` shows where the steps are.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.compiling.configuration import set_everywhere
from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Target


def set_budget(share: float) -> None:
    """Set the budget, from 0 (keep the inputs of each graph only) to 1, for graphs compiled from now on, on every thread.

    Raises SettingNotSeenError, and AttributeError where this torch (before 2.4) has no such setting.
    """
    import torch._functorch.config as functorch

    functorch.activation_memory_budget  # noqa: B018  an unknown name would be accepted by setattr on old versions
    set_everywhere(functorch, "activation_memory_budget", share)


def weigh_activations_only(original: Any, settings: Settings) -> Any:
    """Make the partitioner weigh activations only. For ``choose_saved_values_set``.

    It measures ``(saved - inputs) / (saved at 1.0 - inputs)``, with *all* inputs of the graph, parameters included,
    whether they are saved or not. Where the weights of a block are larger than its activations (float32 weights at batch
    1, say) that is negative, and every budget but 0 is taken for 1.0. Inputs cost nothing: they stay in memory anyway.
    """
    import torch._functorch.partitioners as partitioners

    if hasattr(original, "__wrapped__"):  # another patch has done it
        return original

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


WEIGH_ACTIVATIONS_ONLY = Target(
    "torch._functorch.partitioners",
    "choose_saved_values_set",
    weigh_activations_only,
    _unless_it_weighs,
    optional=True,
    body="runs",
)
"""For every patch with which a budget may be set."""
