"""Read the header of a safetensors file, without its tensors and without torch.

Format: https://huggingface.co/docs/safetensors/index#format. A file may come from another person, so the header is checked as
the library of that name checks it. The values of a :class:`Header` have their types, and its tensors their sizes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_LENGTH = 100_000_000
"""The longest header that the format allows, in bytes."""

_LARGEST = 2**63
"""Sizes and offsets are below it, as in torch."""

_BITS = {
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}
"""Bits of a value by dtype. Later versions of the format may add others."""


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
    numbers = (match[1] for name in names if (match := re.match(r"(?:\w+\.)*?blocks\.([0-9]{1,6})\.", name)) is not None)
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
        header = _parse(text, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file.name} is not a safetensors file") from None
    if problem := _damage(header):
        raise ValueError(f"{file.name} is damaged: {problem}")
    end = max((end for _, end in header.places.values()), default=8 + length)
    if size < end:
        raise ValueError(f"{file.name} is truncated: {size} bytes of {end}")
    return header


def _parse(text: bytes, begin: int) -> Header:
    """Return a header whose tensors begin at a byte of the file. Raises the errors of wrong types."""
    rows = json.loads(text.decode())
    metadata = rows.pop("__metadata__", None) or {}
    for key, value in metadata.items():
        (key + value).encode()  # text without surrogates
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, row in rows.items():
        name.encode()
        first, last = map(_size, row["data_offsets"])
        shapes[name] = tuple(map(_size, row["shape"]))
        dtypes[name] = row["dtype"].encode().decode()
        places[name] = begin + first, begin + last
    return Header(shapes, dtypes, metadata, places)


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise ValueError(f"not a size: {value!r:.20}")
    return value


def _damage(header: Header) -> str:
    """Return why the places of tensors do not fit to their shapes or to each other; empty if they do."""
    for name, (begin, end) in header.places.items():
        bits = _BITS.get(header.dtypes[name])
        if end < begin or (bits is not None and math.prod(header.shapes[name]) * bits != (end - begin) * 8):
            return f"the size of {name[:200]} does not fit to its shape"
    filled = sorted((place, name) for name, place in header.places.items() if place[0] < place[1])
    for ((_, end), name), ((begin, _), other) in itertools.pairwise(filled):
        if begin < end:
            return f"{name[:200]} and {other[:200]} overlap"
    return ""
