"""Set the activation memory budget of torch's partitioner, on every thread and for activations only.

``activation_memory_budget`` is the share of a compiled graph's activations that may be kept for backward. The partitioner
recomputes the rest, the cheapest first. https://pytorch.org/blog/activation-checkpointing-techniques/

Budgets are quantized. The partitioner has three plans: the fastest; one that also recomputes cheap chains of operations; and
one that recomputes everything but matrix products and attention. It takes the first plan within the budget, so all budgets
between two plans give the same result. Only below the third plan does it choose among single products.
``python -m kohya_ext budget`` lists the budgets that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kohya_ext.compiling.configuration import set_everywhere


def set_budget(share: float) -> None:
    """Set the budget for graphs compiled later, on every thread: from 0 (keep only each graph's inputs) to 1.

    Raises ThreadSettingError, or AttributeError if torch is older than 2.4 and has no such setting.
    """
    import torch._functorch.config as functorch

    functorch.activation_memory_budget  # noqa: B018  on old versions setattr accepts an unknown name
    set_everywhere(functorch, "activation_memory_budget", share)
    _exclude_inputs_from_sizes()


def _exclude_inputs_from_sizes() -> None:
    """Patch the partitioner to count only activations. Does nothing if its functions have changed.

    The partitioner computes ``(saved - inputs) / (saved at 1.0 - inputs)`` with *all* inputs of the graph, including
    parameters and inputs that are not saved. If a block's weights are larger than its activations (for example float32
    weights at batch 1), that is negative, and every budget above 0 acts like 1.0. Inputs stay in memory anyway.
    """
    import torch._functorch.partitioners as partitioners

    original = getattr(partitioners, "choose_saved_values_set", None)
    needed = ("_size_of", "solve_min_cut")
    if original is None or hasattr(original, "__wrapped__") or not all(hasattr(partitioners, name) for name in needed):
        return

    def choose_saved_values_set(joint_graph: Any, node_info: Any, memory_budget: float = 1) -> Any:
        if memory_budget in (0, 1):
            return original(joint_graph, node_info, memory_budget)
        inputs = frozenset(node_info.inputs)
        size_of, solve_min_cut = partitioners._size_of, partitioners.solve_min_cut

        def size_beyond_inputs(node: Any) -> Any:
            return 0 if node in inputs else size_of(node)

        def with_true_sizes(*args: Any, **kwargs: Any) -> Any:
            with _replaced(partitioners, "_size_of", size_of):
                return solve_min_cut(*args, **kwargs)

        with _replaced(partitioners, "_size_of", size_beyond_inputs), _replaced(partitioners, "solve_min_cut", with_true_sizes):
            return original(joint_graph, node_info, memory_budget)

    choose_saved_values_set.__wrapped__ = original  # type: ignore[attr-defined]
    partitioners.choose_saved_values_set = choose_saved_values_set


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
