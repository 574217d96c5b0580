"""Decide once a step, not in every block, whether HunyuanImage's batch is padded.

Each block asks the GPU whether all texts have the same length, and waits for the answer: a break in every compiled graph,
and 47 stalls a forward without compiling. The texts are cut to the longest beforehand, so that either there is no padding,
and no mask is needed, or the lengths differ, and the mask does all that the comparison would lead to.
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
        # Split attention slices by the lengths; without a picture it is the text refiner, which reads them.
        if split_attn or not img_len or params.seqlens is None:
            return params
        lengths = params.seqlens.tolist()
        if min(lengths) == params.max_seqlen:
            return replace(params, attention_mask=None, seqlens=None, cu_seqlens=None)
        if min(lengths) != max(lengths):
            return replace(params, seqlens=None)
        return params  # padded alike, which does not happen here: the blocks would cut the padding off

    return staticmethod(create_attention_params_from_mask)


PATCH = Patch(
    name="hunyuan_attention_lengths",
    summary="HunyuanImage's blocks no longer wait for the GPU to learn their text lengths",
    targets=(
        Target(
            "library.attention",
            "AttentionParams.create_attention_params_from_mask",
            _decide_once,
            takes("attn_mode", "split_attn", "img_len", "attention_mask", exactly=True),
            # The original runs; what is taken out of its result is what attention() would otherwise decide by.
            body=known_bodies("8329e1708abc", helpers={"attention": ("069dc47c78f1",)}),
        ),
    ),
    exactness="exact",
    held_to="attention without it, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/attention.py",
)
