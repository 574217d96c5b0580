"""What an older inductor fails at in blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kohya_ext.config.settings import Settings

#: What `_is_valid_woq_optimization_pattern` reads of a match.
_PARTS = ("x", "weight", "scales")


def survive_scaled_products(original: Any, settings: Settings) -> Any:
    """Let inductor meet a 16-bit product that is multiplied by a number, as LoRA's is by ``alpha / rank``.

    In older versions, torch 2.6 among them, a pattern for int8 weights takes every such factor for a tensor of scales, and
    raises: on every device, for the whole graph. To be replaced before the first graph is compiled, when patterns are
    registered. https://github.com/huggingface/peft/issues/2901
    """
    if not _raises_on_a_number(original()):
        return original

    def with_numbers_refused() -> Any:
        check = original()
        return lambda match: all(hasattr(match.kwargs.get(part), "meta") for part in _PARTS) and check(match)

    return with_numbers_refused


def _raises_on_a_number(check: Any) -> bool:
    import torch

    tensor = SimpleNamespace(meta={"val": torch.empty(0)})
    try:
        check(SimpleNamespace(kwargs={"x": tensor, "weight": tensor, "scales": 0.5}))
    except AttributeError:
        return True
    return False
