"""The activation memory budget of torch's partitioner, set where it counts and made to mean what it says.

``activation_memory_budget`` is the share of a compiled graph's activations that may be kept for backward; the rest is
recomputed, the cheapest first. https://pytorch.org/blog/activation-checkpointing-techniques/

It is a flight of stairs. The partitioner has three plans of its own (what is fastest; the same with every cheap chain made
again; the same with everything but products and attention made again) and takes the first one that is below the budget,
however far: from just above that plan's own share to just below the one before, all budgets are one. Only below the third
plan's share it weighs single products against each other. ``python -m kohya_ext budget`` shows where the steps are.
"""

from __future__ import annotations

from kohya_ext.compiling.configuration import set_everywhere


def set_budget(share: float) -> None:
    """Set the budget, from 0 (keep the inputs of each graph only) to 1, for graphs compiled from now on, on every thread.

    Raises SettingNotSeenError, and AttributeError where this torch (before 2.4) has no such setting.
    """
    import torch._functorch.config as functorch

    functorch.activation_memory_budget  # noqa: B018  an unknown name would be accepted by setattr on old versions
    set_everywhere(functorch, "activation_memory_budget", share)
