"""``python -m benchmarks.full_size FAMILY CHECKOUT FOLDER``: checkpoints of real size with random weights, in bf16.

They lie where :func:`kohya_ext.tiny.checkpoints.locate` looks, with the tiny tokenizers, whose few tokens real text encoders
know too. Written piece by piece: 7 GB of SDXL need no 7 GB of memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kohya_ext.tiny import checkpoints, tokenizers

Shapes = Mapping[str, tuple[int, ...]]

#: Numbers drawn once and written again and again.
_NOISE = 2**24


def _sdxl(file: Path) -> None:
    """The names of an SDXL checkpoint, by the converters that sd-scripts saves one with."""
    util, old = importlib.import_module("library.sdxl_model_util"), importlib.import_module("library.model_util")
    build = importlib.import_module("kohya_ext.estimate.models").build
    choices = importlib.import_module("kohya_ext.estimate.memory_config").MemoryConfig("sdxl_train_network.py")
    with torch.device("meta"):
        models = build("sdxl", choices)
        small, large = models.text_encoders
        converted = util.convert_text_encoder_2_state_dict_to_sdxl(large.state_dict(), torch.empty(()))
        parts = {
            "model.diffusion_model.": models.unet.state_dict(),
            "conditioner.embedders.0.transformer.": small.state_dict(),
            "conditioner.embedders.1.model.": converted,
            "first_stage_model.": old.convert_vae_state_dict(models.vae.state_dict()),
        }
    write(file, {prefix + name: tuple(tensor.shape) for prefix, part in parts.items() for name, tensor in part.items()})


WRITERS: Mapping[str, Callable[[Path], None]] = {"sdxl": _sdxl}
"""Families whose real script can be run at full size."""


def write(file: Path, shapes: Shapes) -> None:
    """Write a .safetensors file of random bf16 tensors: small noise, ones for the weights of norms, zeros for their biases."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = _bytes(0.02 * torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)))
    beside = file.with_suffix(".part")
    file.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if len(shape) <= 1:
                out.write(_bytes(torch.full((math.prod(shape),), 0.0 if name.endswith("bias") else 1.0)))
                continue
            left = 2 * math.prod(shape)
            while left:
                left -= out.write(noise[:left])
    beside.replace(file)


def _bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.to(torch.bfloat16).view(torch.int16).numpy()).cast("B")


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_size", description=__doc__)
    parser.add_argument("family", choices=WRITERS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    models = checkpoints.locate(given.family, given.folder)
    tokenizers.write(models.tokenizers)
    sys.path.insert(0, str(given.checkout))
    (file,) = models.files.values()
    WRITERS[given.family](file)


if __name__ == "__main__":
    main()
