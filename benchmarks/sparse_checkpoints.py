"""Full-size checkpoints of every family as sparse files: the names and shapes of their tensors, and zeros without disk space.

Their headers are those of dry runs (kohya_ext/dry_run/headers.json). :func:`write_random` replaces the zeros by random numbers,
for a GPU that computes: it multiplies zeros faster, and losses and gradients would vanish.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kohya_ext.dry_run import stand_ins
from kohya_ext.estimate.memory_config import FP8, MemoryConfig
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts import families
from kohya_ext.tiny import checkpoints

#: Types in a safetensors header and their bytes. Published checkpoints have floating-point tensors in 16 bits; T5 in 8 bits has
#: all of them in 8.
_INTEGERS = {torch.int64: ("I64", 8), torch.int32: ("I32", 4), torch.bool: ("BOOL", 1)}
_16_BITS, _8_BITS = ("BF16", 2), ("F8_E4M3", 1)

_WIDTHS = dict([*_INTEGERS.values(), _16_BITS, _8_BITS, ("F32", 4)])

_RANDOM_NUMBERS = 2**26


def write(config: MemoryConfig, folder: Path, random: bool = False) -> checkpoints.Models:
    """Write the checkpoints of a configuration's family to ``folder``, unless they are there, and return their paths.

    Their weights are zeros. With ``random``, those of the first file, which has the trained model, are random (see
    :func:`write_random`).
    """
    paths = checkpoints.locate(config.family.name, folder)
    if config.t5xxl == FP8:
        paths.files["t5xxl"] = folder / config.family.name / "t5xxl_fp8_e4m3fn.safetensors"
    if not all(path.exists() for path in paths.files.values()):
        kind = families.checkpoint_of(config.script, vars(config))
        assert kind is not None, "a family has checkpoints"
        for option, path in paths.files.items():
            stand_ins.write_checkpoint(kind.title, option, path, fp8=(option, config.t5xxl) == ("t5xxl", FP8))
        if random:
            write_random(paths.files["pretrained_model_name_or_path"])
    return paths


def write_file(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    floats: tuple[str, int] = _16_BITS,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a sparse safetensors file that has zeros for every tensor; ``floats`` is the type of floating-point ones."""
    rows = {name: (_INTEGERS.get(tensor.dtype, floats)[0], (*tensor.shape,)) for name, tensor in tensors.items()}
    _write_zeros(path, rows, metadata or {})


def _write_zeros(path: Path, rows: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> None:
    """Write a sparse file of tensors: name -> type in the header and shape."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (kind, shape) in rows.items():
        size = math.prod(shape) * _WIDTHS[kind]
        header[name] = {"dtype": kind, "shape": [*shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_scaled(path: Path) -> Path:
    """Write the checkpoint of a sparse file with its matrices in fp8 with scales, and return the new file."""
    header, result = read_header(path), path.with_name(f"{path.stem}_fp8_scaled.safetensors")
    rows: dict[str, tuple[str, tuple[int, ...]]] = {"scaled_fp8": ("F8_E4M3", (0,))}
    for name, shape in header.shapes.items():
        layer = name.removesuffix(".weight")
        is_matrix = layer != name and len(shape) == 2 and header.dtypes[name] == "BF16"
        rows[name] = ("F8_E4M3" if is_matrix else header.dtypes[name], shape)
        if is_matrix:
            rows[f"{layer}.scale_weight"] = ("F32", (1,))
    _write_zeros(result, rows, {})
    return result


def write_random(path: Path) -> None:
    """Overwrite a sparse file with weights whose layers keep the variance of their inputs, and biases of 0."""
    normal = torch.randn(_RANDOM_NUMBERS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    contents = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    length = int.from_bytes(bytes(contents[:8].tolist()), "little")
    header = json.loads(bytes(contents[8 : 8 + length].tolist()))
    for name, tensor in header.items():
        if tensor["dtype"] != "BF16":
            continue
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        weight, shape = contents[begin:end].view(torch.bfloat16), tensor["shape"]
        if len(shape) < 2:
            weight.fill_(0 if name.endswith("bias") else 1)
            continue
        # Another part of the numbers for each tensor, so that layers are not equal.
        half = _RANDOM_NUMBERS // 2
        numbers = normal[zlib.crc32(name.encode()) % half :][:half]
        for part in weight.split(half):
            torch.mul(numbers[: len(part)], math.prod(shape[1:]) ** -0.5, out=part)
