"""Assumed values for code that reads a fake tensor's data, and the results of operators that have run before."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from kohya_ext.dry_run.tracker import DEVICE

_META = torch.device("meta")

_EQUALITY = frozenset((torch.ops.aten.eq.Tensor, torch.ops.aten.eq.Scalar))

#: Types of arguments that are part of a key as they are.
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))

#: Properties of operators whose result depends on more than their arguments' metadata, or that change it.
_UNCACHED = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view))


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that an operator returns: new, or a view of its only input."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None
    """Position in the input's storage; None for a new storage."""


#: The type of the sequence that an operator returns, None for a tensor, and the tensors.
_Result = tuple[type[Any] | None, Sequence[_Output]]

#: Results without new tensors, and results that depend on more than the key.
FIRST, NOTHING, VARIES = "first argument", "nothing", "varies"


@dataclass
class Assumptions(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """A dispatch mode above FakeTensorMode that answers ``.item()``, ``.tolist()`` and ``bool()`` on fake tensors.

    ``nonzero`` (a timestep in its schedule) returns one index. Tensors compared for equality, such as lengths, are equal; every
    other comparison is False, and a float is 1.

    Operators on tensors of known sizes return what they have returned before: FakeTensorMode has such a cache too, which takes
    most of an estimate's time.
    """

    mode: FakeTensorMode | None = None
    """The mode of the tensors whose results are reused."""
    integer: int = 0
    """The value of integer tensors: in a training step, the length of a caption."""

    _equal: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Results of comparisons for equality."""
    _templates: dict[torch.device, dict[str, Any]] = field(default_factory=dict)
    """Device -> the attributes of a tensor there."""
    _added: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    """Integer tensor -> the number that was added to the assumed one."""
    _results: ClassVar[dict[tuple[Any, ...], _Result | str]] = {}
    """Results by operator and arguments."""

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: dynamo traces below it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return an assumed value, or run the operator."""
        return args[0].fake_device if func is DEVICE else self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an assumed value, or run the operator."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            dtype = args[0].dtype
            if dtype is torch.bool:
                return args[0] in self._equal
            return 1.0 if dtype.is_floating_point else self.integer + self._added.get(args[0], 0)
        if func is torch.ops.aten.nonzero.default and isinstance(args[0], FakeTensor):
            # Not with torch.tensor: PyTorch 2.6 crashes at times when the constant ends that a fake tensor keeps of it.
            return args[0].new_zeros((1, args[0].dim()), dtype=torch.int64)
        result = self._reuse(func, args, kwargs)
        if func in _EQUALITY or (func is torch.ops.aten.all.default and args[0] in self._equal):
            self._equal[result] = True
        if func is torch.ops.aten.add.Tensor and isinstance(args[1], int) and not result.dtype.is_floating_point:
            self._added[result] = args[1] + self._added.get(args[0], 0)
        return result

    def _reuse(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator, or return the same as before without running it."""
        if self.mode is None:
            return func(*args, **kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[FakeTensor] = []
        if not (self._add(key, tensors, args) and self._add(key, tensors, kwargs.items())):
            return func(*args, **kwargs)
        if not tensors and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not self.mode:
            return func(*args, **kwargs)
        if tensors and _returns_nothing(func):
            return None
        whole = tuple(key)
        known = self._results.get(whole)
        if known is None or known is VARIES:
            result = func(*args, **kwargs)
            if known is None:
                self._results[whole] = VARIES if _UNCACHED.intersection(func.tags) else _described(result, args, tensors)
            return result
        if isinstance(known, str):
            return args[0] if known is FIRST else None
        sequence, outputs = known
        results = [self._tensor(output, tensors) for output in outputs]
        return results[0] if sequence is None else sequence(results)

    def _add(self, key: list[Any], tensors: list[FakeTensor], values: Iterable[Any]) -> bool:
        """Append what describes some arguments to a key, and their tensors; return False for arguments without description."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                dtype = value.dtype
                if value.fake_mode is not self.mode or value.constant is not None or dtype.is_complex:
                    return False
                key += (value.shape, value.stride(), value.storage_offset(), dtype, value.fake_device)
                tensors.append(value)
            elif kind in _PLAIN:
                key += (kind, value)
            elif issubclass(kind, (list, tuple)):
                key.append(len(value))
                if not self._add(key, tensors, value):
                    return False
            else:
                return False
        return True

    def _tensor(self, output: _Output, tensors: Sequence[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
            if output.offset is not None:
                tensor.set_(tensors[0].untyped_storage(), output.offset, output.shape, output.stride)
        template = self._templates.get(output.device)
        if template is None:
            template = self._templates[output.device] = vars(FakeTensor(self.mode, tensor, output.device)).copy()
        result = torch.Tensor._make_subclass(FakeTensor, tensor, dispatch_device=True, device_for_backend_keys=output.device)
        vars(result).update(template)  # faster than its constructor
        return result


@functools.cache
def _returns_nothing(func: Any) -> bool:
    """Return whether an operator only writes to its arguments, as those over lists do, which take FakeTensorMode seconds."""
    return not func._schema.returns


def _described(result: Any, args: Any, tensors: Sequence[FakeTensor]) -> _Result | str:
    """Return how to make an operator's result again."""
    if result is None:
        return NOTHING
    is_sequence = isinstance(result, (tuple, list))
    values = result if is_sequence else (result,)
    first = () if not args else args[0] if is_sequence and isinstance(args[0], (tuple, list)) else (args[0],)
    if len(first) == len(values) and all(value is given for value, given in zip(values, first, strict=True)):
        return FIRST
    given = {tensor.untyped_storage()._cdata for tensor in tensors}
    new: set[int] = set()
    outputs = []
    for value in values:
        if type(value) is not FakeTensor or value.constant is not None or value.dtype.is_complex or value.is_neg():
            return VARIES
        storage, offset = value.untyped_storage(), None
        if storage._cdata in given:
            if len(tensors) != 1 or value is tensors[0]:
                return VARIES
            offset = value.storage_offset()
        elif storage._cdata in new or value.storage_offset():
            return VARIES
        output = _Output((*value.shape,), value.stride(), value.dtype, value.fake_device, offset)
        if offset is None and storage.nbytes() != _bytes(output):
            return VARIES
        new.add(storage._cdata)
        outputs.append(output)
    return (type(result) if is_sequence else None, outputs)


def _bytes(output: _Output) -> int:
    """Return the bytes of a new storage for an output."""
    if 0 in output.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(output.shape, output.stride, strict=True))
    return int((last + 1) * output.dtype.itemsize)
