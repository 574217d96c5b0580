"""Checkpoints by their headers: tensors without data, of the names, shapes and types in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import safetensors
import safetensors.torch
import torch
import wrapt

from kohya_ext.run.safetensors_header import read_header

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class HeaderFile:
    """``safetensors.safe_open`` without data."""

    def __init__(self, filename: Any, framework: object = None, device: Any = "cpu", **_: Any) -> None:
        self.header = read_header(Path(filename))
        self._device = device

    def __enter__(self) -> HeaderFile:
        return self

    def __exit__(self, *_: object) -> None: ...
    def keys(self) -> list[str]:
        """Return the tensors' names."""
        return [*self.header.shapes]

    def metadata(self) -> Mapping[str, str] | None:
        """Return the file's metadata; None without any."""
        return self.header.metadata or None

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return torch.empty(self.header.shapes[name], dtype=_DTYPES[self.header.dtypes[name]]).to(self._device)

    get_slice = get_tensor


def install() -> None:
    """Replace the readers of checkpoints and their hashes for the rest of the process."""
    safetensors.torch.load_file = _load_file
    for module in (safetensors, safetensors.torch):
        setattr(module, "safe_open", HeaderFile)  # noqa: B010
    accelerate.utils.set_module_tensor_to_device = accelerate.utils.modeling.set_module_tensor_to_device = _set_tensor
    accelerate.init_empty_weights = _empty_weights
    wrapt.register_post_import_hook(_replace_upstreams_reader, "library.safetensors_utils")
    for name in ("library.model_io", "library.train_util"):
        wrapt.register_post_import_hook(_skip_hashes, name)


def _load_file(filename: Any, device: Any = "cpu", **_: Any) -> dict[str, torch.Tensor]:
    file = HeaderFile(filename, device=device)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class _empty_weights:  # noqa: N801
    """``accelerate.init_empty_weights``, which has nothing to save here."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _replace_upstreams_reader(module: Any) -> None:
    """Read tensors of MemoryEfficientSafeOpen, which has read the header, without data."""

    def get_tensor(self: Any, key: str, device: Any = None, dtype: Any = None) -> torch.Tensor:
        entry = self.header[key]
        return torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]]).to(device=device or "cpu", dtype=dtype)

    module.MemoryEfficientSafeOpen.get_tensor = get_tensor


def _skip_hashes(module: Any) -> None:
    """Leave out the hashes of models in the metadata, which read whole files."""
    for name in ("calculate_sha256", "model_hash"):
        if hasattr(module, name):
            setattr(module, name, lambda file: "0" * 64)


def _set_tensor(module: Any, name: str, device: Any, value: Any = None, dtype: Any = None, **_: Any) -> None:
    """Replace accelerate's function, which makes a parameter by its class."""
    *path, name = name.split(".")
    for part in path:
        module = getattr(module, part)
    old = getattr(module, name)
    value = (old if value is None else value).to(device=device, dtype=dtype or old.dtype)
    if name in module._buffers:
        module._buffers[name] = value
    else:
        module._parameters[name] = torch.nn.Parameter(value, requires_grad=old.requires_grad)
