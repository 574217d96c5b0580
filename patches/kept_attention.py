"""Keep the results of attention in checkpointed blocks (``--keep_attention``), so that they are not computed twice.

Queries, keys and values are recomputed; the result and its row sums are those of the forward pass, so gradients are the same
bits. Attention with a mask, with dropout or by another library is recomputed as before. So are compiled blocks, whose memory
``--activation_memory_budget`` divides.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import note
from kohya_ext.patching.patch import Patch, Target
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator

_counts: Counter[str] = Counter()

KEEP_ATTENTION = Option(
    "keep_attention",
    False,
    boolean,
    "with --gradient_checkpointing, keep the results of attention instead of computing them again in the backward pass; "
    "exact, for memory that `estimate` predicts",
    activates=True,
)


def _facts() -> Mapping[str, object]:
    return dict(_counts)


@dataclass
class _FirstStep(TrainingCallback):
    """Prints after the first batch whether the option does nothing."""

    is_over: bool = False

    def after_batch(self, accelerator: Accelerator) -> None:
        if not self.is_over and not _counts["kept"]:
            note(
                "--keep_attention has no effect: no block that PyTorch checkpoints (--gradient_checkpointing) has PyTorch's "
                "attention (--sdpa) without a mask"
            )
        self.is_over = True


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _FirstStep:
    return _FirstStep()


def _kept(original: Any, settings: Settings) -> Any:
    import torch

    from kohya_ext.patching import kept_attention

    @wraps(original)
    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **more: Any,
    ) -> Any:
        store = None if torch.compiler.is_compiling() else kept_attention.current()
        if store is None or attn_mask is not None or dropout_p or more.get("enable_gqa"):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **more)
        return kept_attention.attention(original, store, _counts, query, key, value, is_causal, scale)

    return scaled_dot_product_attention


PATCH = Patch(
    name="kept_attention",
    summary="--keep_attention: gradient checkpointing that does not compute attention twice",
    targets=(Target("torch.nn.functional", "scaled_dot_product_attention", _kept, body="runs"),),
    options=(KEEP_ATTENTION,),
    torch="2.6",
    exactness="exact",
    held_to="the same run without it, bit for bit",
    idea="https://pytorch.org/blog/activation-checkpointing-techniques/",
    wanted=lambda settings: settings[KEEP_ATTENTION],
    facts=_facts,
    stage=Stage.COMPUTE,
    on_start=_start,
)
