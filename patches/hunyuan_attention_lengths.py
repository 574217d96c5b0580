"""Check once per forward pass, not in every block, whether HunyuanImage's texts are padded.

Upstream's blocks each compare the text lengths on the GPU and wait for the result: a graph break in every compiled block, and
47 syncs per forward pass without compiling. Texts are already cut to the longest of the batch. Without padding, no mask is
needed. With padding, the mask alone gives the result of the comparison.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies


def _decide_once(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def create_attention_params_from_mask(attn_mode: Any, split_attn: bool, img_len: Any, attention_mask: Any) -> Any:
        params = original(attn_mode, split_attn, img_len, attention_mask)
        # Split attention slices by the lengths. A call without an image comes from the text refiner, which reads them too.
        if split_attn or not img_len or params.seqlens is None:
            return params
        lengths = params.seqlens.tolist()
        if min(lengths) == params.max_seqlen:
            return replace(params, attention_mask=None, seqlens=None, cu_seqlens=None)
        if min(lengths) != max(lengths):
            return replace(params, seqlens=None)
        return params  # equal padding, which the blocks would cut off; it does not occur in training

    return create_attention_params_from_mask


PATCH = Patch(
    name="hunyuan_attention_lengths",
    summary="read HunyuanImage's text lengths from the GPU once per forward pass instead of in every block",
    targets=(
        Target(
            "library.attention",
            "AttentionParams.create_attention_params_from_mask",
            _decide_once,
            takes("attn_mode", "split_attn", "img_len", "attention_mask", exactly=True),
            # The original runs. The fields removed from its result are those that attention() branches on.
            body=known_bodies({"8329e1708abc": "since v0.10.0"}, helpers={"attention": {"069dc47c78f1": "since v0.10.0"}}),
        ),
    ),
    exactness="exact",
    held_to="attention without it, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/attention.py",
)
