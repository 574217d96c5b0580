"""Read the header of a safetensors file, without its tensors and without torch.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MAX_LENGTH = 100_000_000
"""The longest header that the format allows, in bytes."""


@dataclass(frozen=True)
class Header:
    """The tensor shapes, dtypes, places and metadata of a file."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    metadata: Mapping[str, str]
    places: Mapping[str, tuple[int, int]]
    """The first byte of each tensor in the file, and the byte after its last."""


def count_blocks(file: object) -> int | None:
    """Return the number of blocks of a model in a file: its tensors are named ``blocks.0.`` and so on, after any prefix.

    Returns None if the file cannot be read, or has none.
    """
    try:
        names = read_header(Path(str(file))).shapes
    except (OSError, ValueError):
        return None
    numbers = (match[1] for name in names if (match := re.match(r"(?:\w+\.)*?blocks\.(\d+)\.", name)) is not None)
    return max((int(number) + 1 for number in numbers), default=None)


def read_header(file: Path) -> Header:
    """Read the header and check the file's size. Raises ValueError with the file's name when it is invalid, and OSError."""
    size = file.stat().st_size
    if size == 0:
        raise ValueError(f"{file.name} is empty (0 bytes)")
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= _MAX_LENGTH:
            raise ValueError(f"{file.name} is not a safetensors file")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"{file.name} is truncated: {size} bytes, but its header alone takes {8 + length}")
    try:
        rows = json.loads(text)
        metadata = rows.pop("__metadata__", {})
        end = max((row["data_offsets"][1] for row in rows.values()), default=0)
        shapes = {name: tuple(row["shape"]) for name, row in rows.items()}
        dtypes = {name: row["dtype"] for name, row in rows.items()}
        places = {
            name: (8 + length + row["data_offsets"][0], 8 + length + row["data_offsets"][1]) for name, row in rows.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{file.name} is not a safetensors file") from None
    if size < 8 + length + end:
        raise ValueError(f"{file.name} is truncated: {size} bytes of {8 + length + end}")
    return Header(shapes, dtypes, metadata, places)
