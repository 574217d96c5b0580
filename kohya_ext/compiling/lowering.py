"""A fix for older versions of inductor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kohya_ext.config.settings import Settings

#: The operands that `_is_valid_woq_optimization_pattern` reads from a match.
_OPERANDS = ("x", "weight", "scales")


def accept_scaled_products(original: Any, settings: Settings) -> Any:
    """Let inductor compile a 16-bit matrix product that is multiplied by a number, such as LoRA's ``alpha / rank``.

    In older versions, including torch 2.6, a pattern for int8 weights treats every such factor as a tensor of scales and
    raises, on every device. Replace it before the first graph is compiled, because patterns are registered then.
    https://github.com/huggingface/peft/issues/2901
    """
    if not _raises_for_numbers(original()):
        return original

    def without_numbers() -> Any:
        check = original()
        return lambda match: all(hasattr(match.kwargs.get(part), "meta") for part in _OPERANDS) and check(match)

    return without_numbers


def _raises_for_numbers(check: Any) -> bool:
    import torch

    tensor = SimpleNamespace(meta={"val": torch.empty(0)})
    try:
        check(SimpleNamespace(kwargs={"x": tensor, "weight": tensor, "scales": 0.5}))
    except AttributeError:
        return True
    return False
