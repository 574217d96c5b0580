"""Load only the weights of pickled checkpoints (``.ckpt``), so that they cannot run code.

The patched functions pass ``weights_only=False``, which lets a downloaded file run any code. All others use torch's default.
Upstream's code still loads the file; an environment variable of torch overrides its argument.
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
    """Force weights_only in a function that loads a checkpoint from a path."""
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
                f"{file} contains more than weights and could run code; use the model's .safetensors, or --disable_patch "
                "weights_only_checkpoints if you trust the file"
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
    summary="load only the weights of a pickled .ckpt, so that it cannot run code",
    targets=(
        Target("library.model_util", "load_checkpoint_with_text_encoder_conversion", _load, _expect_path, body="runs"),
        Target("networks.lora_lumina", "create_network_from_weights", _load, _expect_path, body="runs"),
        Target("networks.lora_lumina", "LoRANetwork.load_weights", _load, _expect_path, body="runs"),
    ),
    exactness="exact",
    held_to="the weights loaded by upstream",
    idea="https://pytorch.org/docs/stable/notes/serialization.html",
)
