"""Let HunyuanImage train from text encoder outputs that are cached in memory.

Whether a caption quotes text is cached as a bare truth value for each picture, and the data set makes a tensor of it with
``torch.FloatTensor``: up to numpy 2.3 that is one of some uninitialised number, from 2.4 on a TypeError before the first
step. As an array without dimensions, which is what the cache on disk gives back, it is the value.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes


def _with_arrays(original: Any, settings: Settings) -> Any:
    import numpy as np

    @wraps(original)
    def cache_batch_outputs(self: Any, tokenize_strategy: Any, models: Any, text_encoding_strategy: Any, infos: Any) -> None:
        original(self, tokenize_strategy, models, text_encoding_strategy, infos)
        for info in infos:
            if getattr(info, "text_encoder_outputs", None) is not None:
                info.text_encoder_outputs = tuple(np.asarray(output) for output in info.text_encoder_outputs)

    return cache_batch_outputs


PATCH = Patch(
    name="hunyuan_cached_texts",
    summary="HunyuanImage trains from text encoder outputs cached in memory; with numpy 2.4 it stops before the first step",
    targets=(
        Target(
            "library.strategy_hunyuan_image",
            "HunyuanImageTextEncoderOutputsCachingStrategy.cache_batch_outputs",
            _with_arrays,
            takes("self", "tokenize_strategy", "models", "text_encoding_strategy", "infos", exactly=True),
            body="runs",
        ),
    ),
    exactness="exact",
    held_to="the same training with the outputs cached on disk, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/strategy_hunyuan_image.py",
)
