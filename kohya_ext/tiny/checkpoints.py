"""Tiny models of each family, as the files that the training scripts ask for."""

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
    """For --tokenizer_cache_dir and HF_HUB_CACHE."""


def locate(family: str, folder: Path) -> Models:
    """Where `write` puts the models of `family`. Raises KeyError for a family not in `FAMILIES`."""
    stems = {"pretrained_model_name_or_path": family, **{option: option for option in families.BY_NAME[family].files}}
    files = {option: folder / family / f"{stem}.safetensors" for option, stem in stems.items()}
    return Models(family, files, folder / "tokenizers")


def write(family: str, checkout: Path, folder: Path, python: str = sys.executable) -> Models:
    """Writes models and tokenizers to `folder`, in a process of its own: the caller's sd-scripts is not shrunk.

    `checkout` is any sd-scripts tree: the files are the same, bit for bit, and work with every other. `python` needs
    what sd-scripts needs. Takes about six seconds, nearly all of them imports. Raises KeyError for a family not in
    `FAMILIES`, and CalledProcessError, whose `stderr` holds the traceback, when the process fails.
    """
    models = locate(family, folder)
    command = [python, "-m", "kohya_ext.tiny", family, str(checkout), str(folder)]
    variables = os.environ | {"PYTHONPATH": python_path()}
    subprocess.run(command, check=True, capture_output=True, text=True, env=variables)
    return models
