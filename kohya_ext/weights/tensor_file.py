"""Read the tensors of a model file one by one: safetensors, or a file of ``torch.save``.

Tensors of a safetensors file are read with ``read`` instead of a memory map: another process that truncates the file causes an
error instead of SIGBUS, and the process's memory does not grow to the size of the file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kohya_ext.run.safetensors_header import Header, read_header

CHUNK = 2**22
"""Number of values in a chunk: 16 MiB as float32."""

_DTYPES = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Safetensors' name of a dtype -> torch's."""


@dataclass(frozen=True)
class Spec:
    """The shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype: ``bfloat16``."""

    @property
    def count(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class TensorFile:
    """The tensors of a file. Close it, or use it in a ``with`` block."""

    def __init__(self, path: Path) -> None:
        """Open a file. Raises ValueError if it is damaged or of an unknown format, and OSError."""
        self.path, self.size = path, path.stat().st_size
        self._stream: io.BufferedReader | None = None
        self._header: Header | None = None
        self._tensors: Mapping[str, torch.Tensor] = {}
        self.metadata: Mapping[str, str] = {}
        if path.suffix in (".ckpt", ".pt", ".pth", ".bin"):
            self._tensors = _load(path)
            self.specs = {name: Spec(tuple(value.shape), _name(value.dtype)) for name, value in self._tensors.items()}
        else:
            self._header = header = read_header(path)
            self.metadata = header.metadata
            self.specs = {name: Spec(shape, _DTYPES.get(header.dtypes[name], "")) for name, shape in header.shapes.items()}
            self._stream = path.open("rb")
        if not self.specs:
            self.close()
            raise ValueError(f"{path.name} has no tensors")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
        self._tensors = {}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored. Raises ValueError if the file is shorter than its header says, and OSError."""
        return self._read(name, 0, self.specs[name].count).reshape(self.specs[name].shape)

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor in order, as float32 of shape (at most CHUNK,). Raises the errors of :meth:`tensor`."""
        count = self.specs[name].count
        for begin in range(0, count, CHUNK):
            yield self._read(name, begin, min(begin + CHUNK, count)).to(torch.float32)

    def _read(self, name: str, begin: int, end: int) -> torch.Tensor:
        if self._header is None or self._stream is None:
            return self._tensors[name].detach().reshape(-1)[begin:end]
        dtype = getattr(torch, self.specs[name].dtype or "?", None)
        if dtype is None:
            raise ValueError(f"{self.path.name}: this torch cannot read the dtype {self._header.dtypes[name]} of {name}")
        if begin == end:
            return torch.empty(0, dtype=dtype)
        content = bytearray((end - begin) * dtype.itemsize)
        self._stream.seek(self._header.places[name][0] + begin * dtype.itemsize)
        if self._stream.readinto(content) < len(content):
            raise ValueError(f"{self.path.name} is truncated: {name} is incomplete")
        return torch.frombuffer(content, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _load(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of ``torch.save``; the file is mapped, unless it was written before 2020."""
    if path.stat().st_size == 0:
        raise ValueError(f"{path.name} is empty (0 bytes)")
    with path.open("rb") as stream:
        is_zip = stream.read(2) == b"PK"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_zip else None)
        tensors = dict(_flat(content, ""))
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path.name} cannot be read by torch.load with weights_only=True: {reason[:200]}") from None
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu" or tensor.is_complex():
            raise ValueError(f"{path.name}: {name} is a tensor of a kind that is not read: {tensor.dtype}, {tensor.layout}")
        if tensor.nelement() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path.name} is damaged: {name} has more values than the file")
    return tensors


def _flat(content: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of nested dictionaries. ``state_dict`` is not part of their names."""
    if isinstance(content, torch.Tensor):
        yield prefix.removeprefix("state_dict."), content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
