"""A pickled checkpoint (``.ckpt``) is loaded for its weights only: whatever else it holds is not run.

In the places below upstream says ``weights_only=False``, so that a downloaded file may run any code of its maker's; everywhere
else torch's own default holds. The loading is upstream's own; torch's variable overrules what it says.
https://pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import inspect
import os
import pickle
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import stop
from kohya_ext.patching.patch import Patch, Target

_VARIABLE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def _load(original: Any, settings: Settings) -> Any:
    """For a function that is given a checkpoint's path and loads it."""
    signature = inspect.signature(original)

    @wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = "1"
        try:
            return original(*args, **kwargs)
        except pickle.UnpicklingError:
            given = signature.bind(*args, **kwargs).arguments
            file = next(given[name] for name in _PATHS if name in given)
            stop(
                f"{file} holds more than weights and is not loaded: it could run code. Use the model's .safetensors, or, if "
                "you trust the file with your machine, --disable_patch weights_only_checkpoints"
            )
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before

    return load


_PATHS = ("ckpt_path", "file")


def _expect_path(original: Any) -> str | None:
    parameters = list(inspect.signature(original).parameters)
    return None if set(_PATHS) & set(parameters) else f"its parameters are {parameters}"


PATCH = Patch(
    name="weights_only_checkpoints",
    summary="a pickled .ckpt is loaded for its weights only, and cannot run code",
    targets=(
        Target("library.model_util", "load_checkpoint_with_text_encoder_conversion", _load, _expect_path, body="runs"),
        Target("networks.lora_lumina", "create_network_from_weights", _load, _expect_path, body="runs"),
        Target("networks.lora_lumina", "LoRANetwork.load_weights", _load, _expect_path, body="runs"),
    ),
    exactness="exact",
    held_to="the weights that upstream loads",
    idea="https://pytorch.org/docs/stable/notes/serialization.html",
)
