"""Recognize weights that a checkpoint stores in 8 bits with scales, from its header and its notes about layers.

Files of this kind, as people download them:

- ``NAME_fp8_scaled``: ``X.weight`` in fp8 and ``X.scale_weight``, with an empty tensor ``scaled_fp8``,
- ComfyUI's newer files: ``X.weight`` in fp8 or int8 and ``X.weight_scale``, with notes as JSON in ``X.comfy_quant`` or in the
  file's metadata (https://github.com/comfyanonymous/ComfyUI/blob/master/QUANTIZATION.md),
- their int8 weights are rotated if the note has ``convrot``.

A weight is its 8-bit values times its scales. Files in fp8 without scales are ordinary ones. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.run.safetensors_header import Header, read_header

_SCALES = ("scale_weight", "weight_scale")
"""Last parts of the names of scales."""

_LEFT_OUT = ("scale_input", "input_scale", "comfy_quant")
"""Last parts of the names of tensors that belong to a layer's storage: scales of activations, and notes."""

_MARKER = "scaled_fp8"

_INT8 = "I8"

_KNOWN = ("F8_E4M3", "F8_E5M2", _INT8, "BF16", "F16", "F32")
"""Types of values. Some files have scales of weights that they store in 16 bits, too."""

_FORMATS = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fn_rowwise": "F8_E4M3",
    "float8_e4m3fn_blockwise": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8_tensorwise": _INT8,
    "int8_blockwise": _INT8,
}
"""A note's format -> the type of its values. Some files store fp8 as bytes of no type."""

#: Parts of tensor names -> formats that have none of the above.
_OTHERS = {
    "quant_state.bitsandbytes": "bitsandbytes' 4 bits (nf4)",
    ".wscales": "SVDQuant's 4 bits",
    ".weight_scale_2": "nvfp4",
    ".weight._scale": "optimum-quanto's format",
    ".pre_quant_scale": "a format with scaled inputs",
}

_ADVICE = "download the checkpoint in bf16, fp16, fp8 or int8"


class UnreadableError(ValueError):
    """The weights have a format that cannot be read. The text names the file, the format and what to do."""


@dataclass(frozen=True)
class Stored:
    """How one weight is stored."""

    scale: str
    """The name of its scales."""
    dtype: str
    """Safetensors' name of the type of its values."""
    rotation: int = 0
    """The number of columns that are rotated together; 0 if they are not."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights that a file stores in 8 bits with scales."""

    weights: Mapping[str, Stored]
    """Name -> how it is stored."""
    left_out: frozenset[str] = field(default=frozenset())
    """Names of tensors that are only part of the storage."""

    def __str__(self) -> str:
        kinds = sorted({"int8" if stored.dtype == _INT8 else "fp8" for stored in self.weights.values()})
        rotated = ", rotated" if any(stored.rotation for stored in self.weights.values()) else ""
        return f"{len(self.weights)} weights in {' and '.join(kinds)} with scales{rotated}"


def stored_weights(file: Path) -> StoredWeights | None:
    """Return the weights that a safetensors file stores in 8 bits with scales; None if it has none.

    Raises UnreadableError if it has weights in another format, ValueError if it is damaged, and OSError.
    """
    reject_gguf(file)
    return of_header(file, read_header(file))


def reject_gguf(file: Path) -> None:
    """Raise UnreadableError if a file has the format of llama.cpp."""
    with file.open("rb") as stream:
        if stream.read(4) == b"GGUF":
            raise UnreadableError(f"{file.name} is a GGUF file, which cannot be read; {_ADVICE}")


def of_header(file: Path, header: Header) -> StoredWeights | None:
    """Return :func:`stored_weights` of a file whose header has been read."""
    for name in header.shapes:
        for part, title in _OTHERS.items():
            if part in name:
                raise _unreadable(file, title)
    notes = dict(_notes(file, header))
    scales = {name.removesuffix(f".{last}"): name for last in _SCALES for name in header.shapes if name.endswith(f".{last}")}
    scales = {layer: name for layer, name in scales.items() if f"{layer}.weight" in header.shapes}
    left_out = {name for name in header.shapes if name.rpartition(".")[2] in (*_LEFT_OUT, _MARKER)}
    if not scales and not notes and not left_out:
        if any(dtype == _INT8 and name.endswith(".weight") for name, dtype in header.dtypes.items()):
            raise _unreadable(file, "int8 without scales")
        return None
    weights = {
        f"{layer}.weight": _stored(file, header, layer, scales.get(layer), notes.get(layer, {})) for layer in {*scales, *notes}
    }
    return StoredWeights(weights, frozenset(left_out.union(scales.values())))


def _stored(file: Path, header: Header, layer: str, scale: str | None, note: Mapping[str, Any]) -> Stored:
    name = f"{layer}.weight"
    wanted, dtype = str(note.get("format", "")), header.dtypes[name]
    if wanted and wanted not in _FORMATS:
        raise _unreadable(file, wanted)
    if scale is None:
        raise _unreadable(file, f"{wanted} without the scales of {layer}")
    if wanted and dtype in ("U8", "I8"):
        dtype = _FORMATS[wanted]
    if dtype not in _KNOWN or header.dtypes[scale] not in ("F32", "F16", "BF16"):
        raise _unreadable(file, f"{dtype} with scales in {header.dtypes[scale]}")
    rotation = note.get("convrot_groupsize", 256) if note.get("convrot") else 0
    if type(rotation) is not int:
        raise _unreadable(file, "a rotation of an unknown size")
    shape, scales = header.shapes[name], header.shapes[scale]
    if blocks(shape, scales) is None:
        raise _unreadable(file, f"scales of the shape {list(scales)} for weights of {list(shape)}")
    if rotation and not _can_rotate(shape, rotation):
        raise _unreadable(file, f"a rotation of {rotation} columns for weights of {list(shape)}")
    return Stored(scale, dtype, rotation)


def blocks(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the rows and columns of scales of a weight as a matrix; None if the shapes do not fit.

    Known: one for all, one for each row, or one for each block of a matrix, whose blocks have the same size.
    """
    if math.prod(scales) <= 1:
        return 1, 1
    rows, columns = shape[0] if shape else 0, math.prod(shape[1:])
    down, right = scales[0], math.prod(scales[1:])
    fits = down > 0 and right > 0 and rows % down == 0 and columns % right == 0
    return (down, right) if fits and (len(shape) == 2 or right == 1) else None


def _can_rotate(shape: tuple[int, ...], size: int) -> bool:
    """Return whether the rows of a matrix can be rotated in blocks of this size, a power of four."""
    power = size.bit_length() - 1
    return len(shape) == 2 and size == 4 ** (power // 2) and power > 0 and shape[1] % size == 0


def _notes(file: Path, header: Header) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield layers and the notes about their storage; those of the metadata may lack the prefix of the file's names."""
    try:
        layers = json.loads(header.metadata.get("_quantization_metadata", "{}")).get("layers", {})
        for layer, note in layers.items():
            ends = (f".{layer}.weight", f"{layer}.weight")
            if names := [name for name in header.shapes if name.endswith(ends[0]) or name == ends[1]]:
                yield names[0].removesuffix(".weight"), {"format": note} if isinstance(note, str) else dict(note)
        with file.open("rb") as stream:
            for name, (begin, end) in header.places.items():
                layer = name.removesuffix(".comfy_quant")
                if layer != name and f"{layer}.weight" in header.shapes:
                    stream.seek(begin)
                    yield layer, dict(json.loads(stream.read(end - begin)))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise _unreadable(file, "notes that are not JSON") from None


def _unreadable(file: Path, what: str) -> UnreadableError:
    return UnreadableError(f"{file.name} has weights in {what}, which cannot be read; {_ADVICE}")
