"""A pickled checkpoint (``.ckpt``) is loaded for its weights only: whatever else it holds is not run.

Upstream says ``weights_only=False`` there, so that a downloaded file may run any code of its maker's. The loading is
upstream's own; torch's variable overrules what it says. https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import os
import pickle
from functools import wraps
from typing import Any

from kohya_ext.console import stop
from kohya_ext.patching import Patch, Target, takes
from kohya_ext.settings import Settings

_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def _load(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_checkpoint_with_text_encoder_conversion(ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "1"
        try:
            return original(ckpt_path, *args, **kwargs)
        except pickle.UnpicklingError:
            stop(
                f"{ckpt_path} holds more than weights and is not loaded: it could run code. Use the model's .safetensors, or, "
                "if you trust the file with your machine, --disable_patch weights_only_checkpoints"
            )
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before

    return load_checkpoint_with_text_encoder_conversion


PATCH = Patch(
    name="weights_only_checkpoints",
    summary="a pickled .ckpt is loaded for its weights only, and cannot run code",
    targets=(Target("library.model_util", "load_checkpoint_with_text_encoder_conversion", _load, takes("ckpt_path")),),
    exactness="exact",
    held_to="the weights that upstream loads",
    idea="https://pytorch.org/docs/stable/notes/serialization.html",
)
