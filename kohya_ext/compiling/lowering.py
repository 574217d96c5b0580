"""A workaround for older versions of inductor, applied if a probe fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

#: The operands that `_is_valid_woq_optimization_pattern` reads from a match.
_OPERANDS = ("x", "weight", "scales")


def fix_int8_pattern() -> None:
    """Let inductor compile a 16-bit matrix product that is multiplied by a number, such as LoRA's ``alpha / rank``.

    In older versions, including torch 2.6, a pattern for int8 weights treats every such factor as a tensor of scales and
    raises, on every device. Call this before the first graph is compiled, because patterns are registered then.
    https://github.com/huggingface/peft/issues/2901
    """
    try:
        from torch._inductor.fx_passes import quantization

        original = quantization._is_valid_woq_optimization_pattern
    except (ImportError, AttributeError):  # a version without the pattern
        return
    if not _raises_for_numbers(original()):
        return

    def without_numbers() -> Any:
        check = original()
        return lambda match: all(hasattr(match.kwargs.get(part), "meta") for part in _OPERANDS) and check(match)

    quantization._is_valid_woq_optimization_pattern = without_numbers


def _raises_for_numbers(check: Any) -> bool:
    import torch

    tensor = SimpleNamespace(meta={"val": torch.empty(0)})
    try:
        check(SimpleNamespace(kwargs={"x": tensor, "weight": tensor, "scales": 0.5}))
    except AttributeError:
        return True
    return False
