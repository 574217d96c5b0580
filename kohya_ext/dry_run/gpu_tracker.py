"""The tracker of estimates for tensors on a GPU and on the host, and answers for scripts that read values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kohya_ext.dry_run import tracker
from kohya_ext.dry_run.device import GPU, device_for_cpp, fake_tensors, in_compiled, is_creating_on_gpu, is_on_gpu, routed
from kohya_ext.dry_run.events import Kind
from kohya_ext.dry_run.tensor_values import Assumptions
from kohya_ext.dry_run.tracker import DEVICE
from kohya_ext.dry_run.work import Counter
from kohya_ext.estimate.seconds import Work

_aten = torch.ops.aten

#: Operators that a boolean mask may index.
_INDEXED = frozenset((_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default))


@dataclass
class Values(Assumptions):
    """The answers of estimates for a whole script: tensors are equal, and masks that index are all true."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a short host tensor's own value, an assumed value, or run the operator."""
        if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor) and args[0].constant is not None:
            return args[0].constant.item()
        if func is _aten.equal.default and any(isinstance(value, FakeTensor) for value in args):
            return True
        if func in _INDEXED and any(_is_mask(index) for index in args[1]):
            args = (args[0], [_all_true(index) if _is_mask(index) else index for index in args[1]], *args[2:])
        return super().run(func, args, kwargs)


def _is_mask(index: object) -> bool:
    return isinstance(index, FakeTensor) and index.dtype is torch.bool and index.dim() == 1


def _all_true(mask: FakeTensor) -> torch.Tensor:
    """Return the indices that a mask selects, if it selects everything."""
    return torch.arange(len(mask), device=mask.fake_device)


@dataclass
class GpuTracker(tracker.Tracker):
    """Logs the storages in the GPU's memory. It is the only mode above FakeTensorMode."""

    values: Values = field(default_factory=Values)
    copied: int = 0
    """Bytes copied to the GPU since :meth:`take_work`."""
    returned: int = 0
    """The same to the host."""
    recorded_kernels: int = 0
    _crosses: bool = False
    """Whether the operator that runs copies between GPU and host, which takes the bus and no kernel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run, self.device = self._run, GPU

    __hash__ = tracker.Tracker.__hash__

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._crosses = False
        if in_compiled():  # results outside of it are on another device
            return func(*args, **kwargs)
        kwargs = routed(func, args, kwargs)
        if func is _aten.copy_.default:
            self._count_copy(args[1], is_on_gpu(args[0]))
        elif func is _aten._to_copy.default and (device := kwargs.get("device")) is not None:
            self._count_copy(args[0], device.type == "cuda")
        return self.values.run(func, args, kwargs)

    def take_work(self) -> Work:
        """Return the kernels and copies since the last call."""
        work, copied, returned = self.work, self.copied, self.returned
        self.work, self.copied, self.returned = Counter(), 0, 0
        return work.work(copied, returned)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return that torch need not pause Dynamo in each call: only :mod:`compiling` lets it run."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and log it if it runs on the GPU."""
        if func is DEVICE:
            return device_for_cpp(args[0])
        kwargs = kwargs or {}
        if any(map(is_on_gpu, (*fake_tensors(args), *fake_tensors(kwargs.values())))):
            return self.log(func, args, kwargs)
        result = self._run(func, args, kwargs)
        self.record(result, self._kind_of(func, args))
        return result

    def _kind_of(self, func: Any, args: Any) -> Kind:
        return Kind.BUCKET if is_creating_on_gpu() else super()._kind_of(func, args)

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self._crosses:
            super()._count(func, args, kwargs, result)

    def _count_copy(self, source: Any, to_gpu: bool) -> None:
        self._crosses = to_gpu != is_on_gpu(source)
        if self._crosses:
            self.copied += source.nbytes if to_gpu else 0
            self.returned += 0 if to_gpu else source.nbytes

    def record(self, values: Any, kind: Kind) -> None:
        """Log the storages on the GPU that are not in the log yet."""
        for value in fake_tensors((values,)):
            if is_on_gpu(value):
                self._record(value, kind)
