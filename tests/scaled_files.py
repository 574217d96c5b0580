"""Write checkpoints whose weights are stored in 8 bits with scales, in the formats that people download."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

FP8, LARGEST = torch.float8_e4m3fn, 448.0

Tensors = Mapping[str, Any]


def _note(**note: object) -> Any:
    return torch.tensor(list(json.dumps(note).encode()), dtype=torch.uint8)


def _fp8_scaled(layer: str, weight: Any) -> tuple[dict[str, Any], Any]:
    scale = weight.abs().max() / LARGEST
    values = (weight / scale).to(FP8)
    tensors = {f"{layer}.weight": values, f"{layer}.scale_weight": scale.view(1), f"{layer}.scale_input": torch.ones(1)}
    return tensors, values.float() * scale


def _comfy_fp8(layer: str, weight: Any) -> tuple[dict[str, Any], Any]:
    tensors, expected = _fp8_scaled(layer, weight)
    note = _note(format="float8_e4m3fn", full_precision_matrix_mult=True)
    return {
        f"{layer}.weight": tensors[f"{layer}.weight"],
        f"{layer}.weight_scale": tensors[f"{layer}.scale_weight"].squeeze(),
        f"{layer}.comfy_quant": note,
    }, expected


def _fp8_blocks(layer: str, weight: Any) -> tuple[dict[str, Any], Any]:
    blocks = weight.reshape(len(weight), -1, 8)
    scale = blocks.abs().amax(2, keepdim=True).clamp_min(1e-12) / LARGEST
    values = (blocks / scale).to(FP8)
    tensors = {f"{layer}.weight": values.view(weight.shape), f"{layer}.scale_weight": scale.bfloat16()}
    return tensors, (values.float() * scale.bfloat16().float()).view(weight.shape)


def _int8_rows(layer: str, weight: Any) -> tuple[dict[str, Any], Any]:
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    values = (weight / scale).round().to(torch.int8)
    note = _note(format="int8_tensorwise")
    return {f"{layer}.weight": values, f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": note}, values.float() * scale


def _convrot(layer: str, weight: Any, size: int = 16) -> tuple[dict[str, Any], Any]:
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1.0]]) / 2
    rotation = torch.block_diag(*[torch.kron(four, four)] * (weight.shape[1] // size))
    tensors, rotated = _int8_rows(layer, weight @ rotation.T)
    note = _note(format="int8_tensorwise", convrot=True, convrot_groupsize=size)
    return {**tensors, f"{layer}.comfy_quant": note}, rotated @ rotation


FORMATS: Mapping[str, Callable[..., tuple[dict[str, Any], Any]]] = {
    "fp8_scaled": _fp8_scaled,
    "comfy_fp8": _comfy_fp8,
    "fp8_blocks": _fp8_blocks,
    "int8_rows": _int8_rows,
    "convrot": _convrot,
}


def write(source: Path, folder: Path, format_name: str) -> tuple[Path, Path]:
    """Write a checkpoint in a format, and the one in bf16 that has the same weights; return both files.

    The second has the 8-bit values times their scales, computed in float32. Matrices of 32 columns or more are in 8 bits.
    """
    from safetensors.torch import load_file, save_file

    stored: dict[str, Any] = {"scaled_fp8": torch.empty(0, dtype=FP8)} if format_name == "fp8_scaled" else {}
    usual = {}
    for name, tensor in load_file(source).items():
        layer = name.removesuffix(".weight")
        if layer != name and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            tensors, weight = FORMATS[format_name](layer, tensor.float())
            stored |= tensors
            usual[name] = weight.bfloat16()
        else:
            stored[name] = usual[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    files = folder / f"{source.stem}_{format_name}.safetensors", folder / f"{source.stem}_bf16_of_{format_name}.safetensors"
    for file, tensors in zip(files, (stored, usual), strict=True):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return files


def words(files: Mapping[str, Path], options: Iterator[str], folder: Path, format_name: str) -> tuple[list[str], list[str]]:
    """Write the checkpoints of some options; return the words for those in a format, and for the usual ones."""
    pairs = {option: write(files[option], folder, format_name) for option in options}
    return tuple([word for option, pair in pairs.items() for word in (f"--{option}", str(pair[index]))] for index in (0, 1))
