"""Tiny models of each family, in the file formats of the training scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kohya_ext.sdscripts import families
from kohya_ext.tiny.environment import python_path

FAMILIES = tuple(family.name for family in families.FAMILIES)


@dataclass(frozen=True)
class Models:
    """The tiny models of one family."""

    family: str
    files: dict[str, Path]
    """Option of the training script, without dashes -> .safetensors file, float32."""
    tokenizers: Path
    """Folder for --tokenizer_cache_dir and HF_HUB_CACHE."""


def locate(family: str, folder: Path) -> Models:
    """Return the paths of the models that `write` creates. Raises KeyError for a family not in `FAMILIES`."""
    stems = {"pretrained_model_name_or_path": family, **{option: option for option in families.BY_NAME[family].files}}
    files = {option: folder / family / f"{stem}.safetensors" for option, stem in stems.items()}
    return Models(family, files, folder / "tokenizers")


def write(family: str, checkout: Path, folder: Path, python: str = sys.executable) -> Models:
    """Write models and tokenizers to `folder`, in a separate process, so that the caller's sd-scripts is not shrunk.

    The files are bit-identical for every sd-scripts `checkout` and work with all of them. `python` must have the
    requirements of sd-scripts. Takes about six seconds, mostly for imports. Raises KeyError for a family not in
    `FAMILIES`, and CalledProcessError with the traceback in `stderr` if the process fails.
    """
    models = locate(family, folder)
    command = [python, "-m", "kohya_ext.tiny", family, str(checkout), str(folder)]
    variables = os.environ | {"PYTHONPATH": python_path()}
    subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return models
