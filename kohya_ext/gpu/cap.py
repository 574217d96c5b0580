"""What ``--vram_budget`` leaves for tensors, and when none of it is spent. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from kohya_ext.config.preset_files import FAMILIES
from kohya_ext.config.settings import Settings
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.units import AUTO

#: What ``auto`` leaves free of the card: a desktop's windows that are opened while training.
MARGIN = 0.05

#: What the blocks are filled up to, of the cap: the allocator wastes a little between tensors of other sizes.
FILLED = 0.97


def for_tensors(budget: int | str, free: float, total: float) -> float:
    """Return the bytes that a budget leaves for tensors on a card of ``total`` bytes.

    What is ``free`` is free beside the context that the process has by now; a size counts from nothing.
    """
    return free - MARGIN * total if budget == AUTO else int(budget) - CONTEXT_BYTES


def reason_not_to_spend(script: str, arguments: Any, settings: Settings) -> str | None:
    """Return why a run of a script (its file name) frees no blocks, in words; None when it does.

    ``arguments`` has the script's own by name, those that are not there count as off.
    """
    if script not in FAMILIES:
        return "this script's model has no blocks that are checkpointed one by one"
    for name in ("gradient_checkpointing_ratio", "activation_memory_budget"):
        if settings[name] is not None:
            return f"--{name} says how"
    for name in ("torch_compile", "compile", "cpu_offload_checkpointing", "unsloth_offload_checkpointing", "deepspeed"):
        if getattr(arguments, name, False):
            return f"with --{name} blocks cannot be freed one by one"
    return None
