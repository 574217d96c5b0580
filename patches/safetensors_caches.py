"""``--cache_format safetensors``: write caches of latents and text encoder outputs as safetensors files, in 16 bits if wanted.

Upstream's strategies name, write and read the files. Here the names end with ``.safetensors``, and NumPy's functions, which the
strategies call, write and read files with that suffix. An existing ``.npz`` is read as before.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

from kohya_ext.caching import safetensors_file
from kohya_ext.config.settings import Option, Settings, one_of
from kohya_ext.patching.patch import Patch, Target, takes

CACHE_FORMAT = Option(
    "cache_format",
    "npz",
    one_of("npz", "safetensors"),
    "format of new cache files on disk; existing .npz files are read with either",
    metavar="npz|safetensors",
)
CACHE_DTYPE = Option(
    "cache_dtype",
    "fp32",
    one_of(*safetensors_file.DTYPES),
    "type of values in new cache files with --cache_format safetensors: fp32 is exact, bf16 and fp16 halve the size",
    metavar="fp32|bf16|fp16",
)

#: Module of strategies -> prefixes of the classes that name latents and text encoder outputs.
_STRATEGIES = {
    "sd": ("SdSdxl", None),
    "sdxl": (None, "Sdxl"),
    "sd3": ("Sd3", "Sd3"),
    "flux": ("Flux", "Flux"),
    "lumina": ("Lumina", "Lumina"),
    "anima": ("Anima", "Anima"),
    "hunyuan_image": ("HunyuanImage", "HunyuanImage"),
}


def _renamed(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def get_path(self: Any, *args: Any, **kwargs: Any) -> str:
        self.kohya_ext_reader = safetensors_file.ReaderInWorkers()  # goes to the data loader's workers with the strategy
        path: str = original(self, *args, **kwargs)
        renamed = os.path.splitext(path)[0] + safetensors_file.SUFFIX
        return path if os.path.exists(path) and not os.path.exists(renamed) else renamed

    return get_path


def _savez(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def savez(file: Any, *args: Any, **arrays: Any) -> None:
        if safetensors_file.has_suffix(file):
            safetensors_file.write(os.fspath(file), arrays, settings[CACHE_DTYPE])
        else:
            original(file, *args, **arrays)

    return savez


def _load(original: Any, settings: Settings) -> Any:
    return safetensors_file.loads_safetensors(original)


def _targets() -> tuple[Target, ...]:
    targets = [
        Target("numpy", "savez", _savez, takes("file"), body="runs"),
        Target("numpy", "load", _load, takes("file"), body="runs"),
    ]
    for name, (latents, texts) in _STRATEGIES.items():
        module = f"library.strategy_{name}"
        if latents is not None:
            attribute = f"{latents}LatentsCachingStrategy.get_latents_npz_path"
            targets.append(Target(module, attribute, _renamed, takes("self", "absolute_path", "image_size"), body="runs"))
        if texts is not None:
            attribute = f"{texts}TextEncoderOutputsCachingStrategy.get_outputs_npz_path"
            targets.append(Target(module, attribute, _renamed, takes("self", "image_abs_path"), body="runs"))
    return tuple(targets)


PATCH = Patch(
    name="safetensors_caches",
    summary="write caches on disk as safetensors files with checksums, in 16 bits if wanted",
    targets=_targets(),
    options=(CACHE_FORMAT, CACHE_DTYPE),
    wanted=lambda settings: settings[CACHE_FORMAT] == "safetensors",
    exactness="close",
    held_to="the same values in .npz files; equal with --cache_dtype fp32, else rounded to bf16 or fp16",
    idea="https://huggingface.co/docs/safetensors",
)
