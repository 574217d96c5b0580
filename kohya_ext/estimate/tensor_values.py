"""Assumed values for code that reads a fake tensor's data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from kohya_ext.estimate.tracker import DEVICE


@dataclass
class Assumptions(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """A dispatch mode above FakeTensorMode that answers ``.item()``, ``.tolist()`` and ``bool()`` on fake tensors.

    ``nonzero`` (a timestep in its schedule) returns one index. Tensors compared for equality, such as lengths, are equal; every
    other comparison is False, and a float is 1.
    """

    integer: int = 0
    """The value of integer tensors: in a training step, the length of a caption."""

    _equal: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Results of comparisons for equality."""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: dynamo traces below it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an assumed value, or run the operator."""
        if func is DEVICE:
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            return args[0] in self._equal if dtype is torch.bool else 1.0 if dtype.is_floating_point else self.integer
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            return torch.zeros(1, args[0].dim(), dtype=torch.long)
        result = func(*args, **(kwargs or {}))
        equality = func in (torch.ops.aten.eq.Tensor, torch.ops.aten.eq.Scalar)
        if equality or (func is torch.ops.aten.all.default and args[0] in self._equal):
            self._equal[result] = True
        return result
