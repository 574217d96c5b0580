"""Keep the 8-bit weights of a base in a file, which later runs map instead of quantizing the checkpoint again.

The file has the weight and the scales of each layer, and in its metadata what they were made from. A run whose weights are
made from anything else does not read it, and replaces it. See :func:`origin` and :func:`content`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kohya_ext.quantization.rotation import BLOCK
from kohya_ext.run.atomic_write import remove_abandoned, truncated, write_atomically
from kohya_ext.run.file_index import check_id
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.weights.postponed import history_of

_VERSION = 1
"""Increase when the quantization or the file's content changes."""

_ENTRY = "kohya_ext_base"
"""The entry in the metadata: JSON of what the weights were made from."""

_ROWS = 4
"""Rows of each weight that its layer's content is known by."""

_DTYPES = {torch.float32: "F32", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"}

Layers = Sequence[tuple[str, Any]]
"""Names and linear layers."""

Origin = Mapping[str, object]
"""What weights are made from, as JSON values. The keys are words for messages."""


class UnusableError(ValueError):
    """The file is damaged, or its weights are made from something else."""


def file_in(folder: Path, args: Namespace, precision: str) -> Path:
    """Return the file of a run's checkpoint, with the networks that are merged into it, for ``int8`` or ``fp8``."""
    checkpoint = Path(args.pretrained_model_name_or_path)
    paths = [str(file.resolve()) for file in (checkpoint, *map(Path, _merged(args)))]
    return folder / f"{truncated(checkpoint.stem)}.{precision}-{check_id(paths, _multipliers(args))}.safetensors"


def origin(args: Namespace, kind: torch.dtype, device: torch.device) -> Origin:
    """Return what decides a run's 8-bit weights, except the layers' own weights.

    Software and device are included, because the last bit of their sums may differ.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return {
        "format": [_VERSION, str(kind), BLOCK],
        "software": [torch.__version__, torch.get_float32_matmul_precision()],
        "device": name,
        "checkpoint": _facts(Path(args.pretrained_model_name_or_path)),
        "merged networks": [[_facts(Path(file)) for file in _merged(args)], _multipliers(args)],
    }


def content(layers: Layers) -> str:
    """Return a hash of names, shapes and precisions of layers, and of some rows of each as the run has loaded and merged it."""
    digest = hashlib.sha256()
    for name, layer in layers:
        weight = layer.weight.detach()
        rows = sorted({row * (len(weight) - 1) // (_ROWS - 1) for row in range(_ROWS)})
        digest.update(repr((name, tuple(weight.shape), history_of(weight).identity(rows))).encode())
    return digest.hexdigest()


def _merged(args: Namespace) -> Sequence[str]:
    return getattr(args, "base_weights", None) or ()


def _multipliers(args: Namespace) -> list[float]:
    return getattr(args, "base_weights_multiplier", None) or []


def _facts(path: Path) -> list[list[object]]:
    """Return name, size and time of a file, or of all files of a folder; nothing for a repository's name."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


@dataclass(frozen=True)
class BaseCache:
    """The file of a checkpoint's 8-bit weights, and what the run's weights are made from."""

    path: Path
    kind: torch.dtype
    origin: Origin

    def read(self, layers: Layers) -> Iterator[tuple[torch.Tensor, torch.Tensor]] | None:
        """Return the mapped weights of the layers: 8 bits as int8, and the fp32 scales of the rows; None without a file.

        Raises UnusableError, and OSError.
        """
        if not self.path.exists():
            return None
        try:
            header = read_header(self.path)
            written = json.loads(header.metadata[_ENTRY])
        except (ValueError, KeyError) as error:
            raise UnusableError(f"it is damaged ({error})") from None
        if differing := [key for key, value in self.origin.items() if written.get(key) != value]:
            raise UnusableError(f"it was made with another {', '.join(differing)}")
        return self._mapped(layers)

    def _mapped(self, layers: Layers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        with safe_open(self.path, framework="pt") as file:
            for name, _ in layers:
                yield file.get_tensor(f"{name}.weight").view(torch.int8), file.get_tensor(f"{name}.scales")

    def write(self, layers: Layers) -> None:
        """Write the converted layers. Raises OSError; an earlier file is then unchanged."""
        # Scales first, so that all of them are aligned.
        tensors = {f"{name}.scales": layer.scales for name, layer in layers}
        tensors |= {f"{name}.weight": layer.weight.detach().view(self.kind) for name, layer in layers}
        header = _header(tensors, {_ENTRY: json.dumps(self.origin)})

        def write(temporary: Path) -> None:
            # safetensors' own writer, before version 0.8, copies all tensors first.
            with temporary.open("wb") as stream:
                stream.write(header)
                for tensor in tensors.values():
                    stream.write(tensor.contiguous().view(torch.uint8).cpu().numpy().data)

        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(self.path.parent)
        write_atomically(self.path, write, lambda: len(header) + sum(tensor.nbytes for tensor in tensors.values()))


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file with these tensors, padded to a multiple of 8."""
    rows: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        rows[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(rows).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
