"""Give attention the mask of Lumina 2 and of FLUX (--apply_t5_attn_mask) without expanding it to all heads and queries.

Upstream expands the mask of shape (batch, 1, 1, tokens) to (batch, heads, tokens, tokens). The view needs no memory, but
PyTorch turns a boolean mask into numbers of the same shape in each block and saves them for backward: 1 GB for each block of
FLUX at 1024x1024 pixels. A mask with a single head and query is broadcast instead. The kernel reads the same numbers.

Lengths instead of a mask would select another kernel (flash), whose results differ by rounding: see needless_masks.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes


def _unexpanded(mask: Any) -> Any:
    """Return a mask of shape (batch, heads, queries, keys) with a single head or query where all are the same memory."""
    for dimension in (1, 2) if mask is not None and mask.dim() == 4 else ():
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    return mask


def _flux(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def attention(q: Any, k: Any, v: Any, pe: Any, attn_mask: Any = None) -> Any:
        return original(q, k, v, pe, _unexpanded(attn_mask))

    return attention


def _attend(q: Any, k: Any, v: Any, attn_mask: Any = None, **rest: Any) -> Any:
    import torch.nn.functional as F  # noqa: N812

    return F.scaled_dot_product_attention(q, k, v, attn_mask=_unexpanded(attn_mask), **rest)


def _lumina(original: Any, settings: Settings) -> Any:
    import torch.nn.functional as F  # noqa: N812

    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if self.attention_processor is F.scaled_dot_product_attention:
            self.attention_processor = _attend

    return __init__


PATCH = Patch(
    name="broadcast_masks",
    summary="give attention the masks of Lumina 2 and FLUX without a copy for every head and query",
    targets=(
        Target("library.flux_models", "attention", _flux, takes("q", "k", "v", "pe", "attn_mask", exactly=True), body="runs"),
        Target("library.lumina_models", "JointAttention.__init__", _lumina, takes("self", "dim", "n_heads"), body="runs"),
    ),
    exactness="exact",
    held_to="blocks without it, bit for bit, on a CPU",
    idea="https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html",
)
