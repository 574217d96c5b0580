"""Let HunyuanImage train with text encoder outputs cached in memory.

Upstream caches a Python bool for each image, true if its caption contains quoted text. The dataset converts it with
``torch.FloatTensor``. Up to numpy 2.3 that gives an uninitialized tensor of one element; from 2.4 on it raises TypeError before
the first step. A zero-dimensional array, as read from the disk cache, converts correctly.
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
    summary="fix HunyuanImage with text encoder outputs cached in memory, which fails before the first step with numpy 2.4",
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
    held_to="training with the outputs cached on disk, bit for bit",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/library/strategy_hunyuan_image.py",
)
