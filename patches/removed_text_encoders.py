"""Let a fine-tune of SD 3 write its final model when its text encoder outputs are cached.

Upstream removes the text encoders then, and passes None in their place to accelerate's ``unwrap_model`` after the last step.
accelerate up to 1.6 returns it; later ones look for compiled blocks in it and raise AttributeError, before the model is saved.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes


def _unwrap_model(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def unwrap_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return None if model is None else original(self, model, *args, **kwargs)

    return unwrap_model


PATCH = Patch(
    name="removed_text_encoders",
    summary="write the final model of SD 3 fine-tunes with cached text encoder outputs, which fails since accelerate 1.7",
    targets=(Target("accelerate.accelerator", "Accelerator.unwrap_model", _unwrap_model, takes("self", "model"), body="runs"),),
    exactness="exact",
    held_to="the models that upstream saves during the same run",
    idea="https://github.com/kohya-ss/sd-scripts/blob/main/sd3_train.py",
)
