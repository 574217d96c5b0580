"""Set the activation memory budget of torch's partitioner, on every thread and for activations only.

``activation_memory_budget`` is the share of a compiled graph's activations that may be kept for backward. The partitioner
recomputes the rest, the cheapest first. https://pytorch.org/blog/activation-checkpointing-techniques/

Budgets are quantized. The partitioner has three plans: the fastest; one that also recomputes cheap chains of operations; and
one that recomputes everything but matrix products and attention. It takes the first plan within the budget, so all budgets
between two plans give the same result. Only below the third plan does it choose among single products.
``python -m kohya_ext budget`` lists the budgets that differ.
"""

from __future__ import annotations

from kohya_ext.compiling.configuration import set_everywhere


def set_budget(share: float) -> None:
    """Set the budget for graphs compiled later, on every thread: from 0 (keep only each graph's inputs) to 1.

    Raises ThreadSettingError, or AttributeError if torch is older than 2.4 and has no such setting.
    """
    import torch._functorch.config as functorch

    functorch.activation_memory_budget  # noqa: B018  on old versions setattr accepts an unknown name
    set_everywhere(functorch, "activation_memory_budget", share)
