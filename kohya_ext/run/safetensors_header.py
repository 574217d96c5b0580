"""What a safetensors file holds, from its header alone: no tensor is read, nothing needs torch.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 100_000_000
"""Bytes of header that the format allows."""


@dataclass(frozen=True)
class Header:
    """A file's tensors and metadata."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Read the header and compare the file's size with it. Raises ValueError that says what is wrong, OSError."""
    size = file.stat().st_size
    if size == 0:
        raise ValueError(f"{file.name} is empty (0 bytes)")
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _LONGEST:
            raise ValueError(f"{file.name} is not a safetensors file")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"{file.name} is truncated: {size} bytes, its header alone has {8 + length}")
    try:
        rows = json.loads(text)
        metadata = rows.pop("__metadata__", {})
        end = max((row["data_offsets"][1] for row in rows.values()), default=0)
        shapes = {name: tuple(row["shape"]) for name, row in rows.items()}
        dtypes = {name: row["dtype"] for name, row in rows.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{file.name} is not a safetensors file") from None
    if size < 8 + length + end:
        raise ValueError(f"{file.name} is truncated: {size} bytes of {8 + length + end}")
    return Header(shapes, dtypes, metadata)
