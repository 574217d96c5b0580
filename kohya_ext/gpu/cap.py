"""The memory that ``--vram_budget`` leaves for tensors, and when blocks use it. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from kohya_ext.config.preset_files import FAMILIES
from kohya_ext.config.settings import Settings
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.units import AUTO

#: Fraction of the GPU that ``auto`` leaves free, for windows that open during training.
MARGIN = 0.05

#: Usable fraction of the cap; the rest covers fragmentation.
USABLE_FRACTION = 0.97


def tensor_limit(budget: int | str, free: float, total: float) -> float:
    """Return the bytes that a budget leaves for tensors on a GPU of ``total`` bytes.

    ``free`` excludes this process's CUDA context; a budget in bytes includes it.
    """
    return free - MARGIN * total if budget == AUTO else int(budget) - CONTEXT_BYTES


def reason_unused(script: str, arguments: Any, settings: Settings) -> str | None:
    """Return why a budget frees no blocks of a script (its file name); None if it frees some.

    ``arguments`` has the script's own arguments as attributes; missing ones count as off.
    """
    if script not in FAMILIES:
        return "this script's model has no separately checkpointed blocks"
    for name in ("gradient_checkpointing_ratio", "activation_memory_budget"):
        if getattr(settings, name) is not None:
            return f"--{name} takes precedence"
    for name in ("torch_compile", "compile", "cpu_offload_checkpointing", "unsloth_offload_checkpointing", "deepspeed"):
        if getattr(arguments, name, False):
            return f"--{name} does not checkpoint blocks separately"
    return None
