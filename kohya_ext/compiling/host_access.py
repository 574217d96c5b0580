"""Find operations that a recording would freeze: reads of the device's results, and copies from the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations whose result, or the size of whose result, the host reads.
_READS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim"),
        *("unique_consecutive", "unique_dim_consecutive", "bincount"),
        "_linalg_check_errors",  # torch.inverse and its kin
    )
)
_INDEXED = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy", "aten::_copy_from"})


class HostAccess(TorchDispatchMode):  # type: ignore[misc]
    """Keeps the first operation inside the block at which the host waits for the device or copies data to it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.reason: str | None = None
        """What the operation does, and where; None if there was none."""
        self._device = device.type

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: compiled code stays compiled inside, and its remaining operators are checked."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if self.reason is None and (access := self._access(func._schema.name, args, kwargs or {})) is not None:
            self.reason = f"the model {access} in every step ({_caller()})"
        return func(*args, **(kwargs or {}))

    def _access(self, name: str, args: Any, kwargs: Any) -> str | None:
        if name in _READS or name in _INDEXED or name in _COPIES:
            tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            devices = {tensor.device.type for tensor in tensors}
            if name in _READS and self._device in devices:
                return "reads results on the CPU"
            is_filled = len(args) > 2 and args[2].numel() == 1  # assigning a number does not need the number of elements
            if name in _INDEXED and not is_filled and any(_is_mask(index) for index in args[1]):
                return "selects elements by a mask"
            target = kwargs.get("device")
            if name in _COPIES and len(devices | ({torch.device(target).type} if target is not None else set())) > 1:
                return "copies data between CPU and GPU"
        return None


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _caller() -> str:
    """Return ``file:line`` of the innermost frame outside of torch and this package."""
    frames: Iterator[traceback.FrameSummary] = reversed(traceback.extract_stack())
    folders = (Path(torch.__file__).parent, Path(__file__).parent)
    for frame in frames:
        path = Path(frame.filename)
        if not any(folder in path.parents for folder in folders):
            return f"{path.name}:{frame.lineno}"
    return "?"
