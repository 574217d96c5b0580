"""Cache files in the safetensors format, behind NumPy's functions for ``.npz`` files.

A file has the arrays that the ``.npz`` would have. Its metadata holds each array's data type, and a checksum, because the
format has none. Floating-point arrays may be stored in 16 bits; reading returns their own type again. Alpha masks, and
arrays that would overflow, keep 32 bits.
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kohya_ext.run.atomic_write import write_atomically

SUFFIX = ".safetensors"

#: Option's value -> torch's data type of stored float32 arrays.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_MASK = "alpha_mask"

#: The entry in the metadata: JSON of {array: [data type, CRC-32 of the stored bytes]}.
_ENTRY = "kohya_ext_cache"


class DamagedFileError(ValueError):
    """A file's contents do not match their checksum."""


class Arrays(dict[str, Any]):
    """The arrays of a file by name."""

    @property
    def files(self) -> list[str]:
        """The names, as an open ``.npz`` file has them."""
        return list(self)


def has_suffix(file: object) -> bool:
    """Return whether a file is the path of a safetensors file."""
    return isinstance(file, (str, os.PathLike)) and os.fspath(file).endswith(SUFFIX)


def write(file: str, arrays: Mapping[str, Any], dtype: str = "fp32") -> None:
    """Write arrays to a file atomically, in the type that an option's value names."""
    import numpy as np
    import torch
    from safetensors.torch import save

    tensors, facts = {}, {}
    for name, value in arrays.items():
        array = np.asarray(value)
        tensor = torch.from_numpy(array.copy())  # contiguous, and of this file alone
        if array.dtype == np.float32 and array.ndim > 0 and not name.startswith(_MASK):
            short = tensor.to(getattr(torch, DTYPES[dtype]))
            tensor = short if bool(short.isfinite().all()) or not bool(tensor.isfinite().all()) else tensor
        tensors[name] = tensor
        facts[name] = str(array.dtype), _checksum(tensor)
    # One entry: safetensors writes several in any order, and equal arrays should give equal files.
    data = save(tensors, {_ENTRY: json.dumps(facts)})
    write_atomically(Path(file), lambda temporary: temporary.write_bytes(data), lambda: len(data))


def read(file: str) -> Arrays:
    """Return the arrays of a file. Raises DamagedFileError, or safetensors' own error for a truncated file."""
    from safetensors.torch import load

    data = Path(file).read_bytes()
    length = int.from_bytes(data[:8], "little")
    facts = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_ENTRY])
    arrays = Arrays()
    for name, tensor in load(data).items():
        dtype, checksum = facts[name]
        if _checksum(tensor) != checksum:
            raise DamagedFileError(f"{file}: {name} has changed since it was written")
        arrays[name] = tensor.float().numpy() if dtype == "float32" else tensor.numpy()
    return arrays


def _checksum(tensor: Any) -> int:
    import torch

    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def loads_safetensors(original: Any) -> Any:
    """Return ``numpy.load``, extended by safetensors files."""

    @functools.wraps(original)
    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        return read(os.fspath(file)) if has_suffix(file) else original(file, *args, **kwargs)

    return load


class ReaderInWorkers:
    """Installs the reader in a process that unpickles it: a data loader's worker on Windows, which has no patches."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _installed, ()


@functools.cache
def _installed() -> ReaderInWorkers:
    import numpy as np

    np.load = loads_safetensors(np.load)
    return ReaderInWorkers()
