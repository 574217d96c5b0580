"""Fake tensors that say ``cuda:0`` to Python and ``cpu`` to C++.

Dispatch keys, autograd and autocast of the CPU exist in every build of torch, so neither a GPU nor a driver is needed, and the
code of a script and its libraries sees tensors on a GPU. Everything here replaces parts of torch for the rest of the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake
import torch.overrides
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from kohya_ext.dry_run.tracker import DEVICE

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)

_to, _numpy, _numbers = torch.Tensor.to, torch.Tensor.numpy, torch.FloatTensor
_get_data, _set_data = torch._C.TensorBase.data.__get__, torch._C.TensorBase.data.__set__
_requested_moves = 0  # above 0 while a move that Python asked for runs: "cpu" then means the host
_creating_on_gpu = False  # whether C++ makes tensors from nothing for the GPU now
_caches: tuple[dict[Any, Any], dict[Any, Any]] = (FakeTensorMode.cache, {})
_in_compiled = 0  # above 0 while compiled code is traced or runs: all of its tensors are on the GPU, and say "cpu" to Python


def is_on_gpu(value: object) -> bool:
    """Return whether a value is a tensor in the GPU's memory."""
    return isinstance(value, FakeTensor) and (_in_compiled > 0 or value.fake_device.type == "cuda")


def device_for_python(tensor: FakeTensor) -> torch.device:
    """Return the device of a tensor for Python: Dynamo traces compiled code as the CPU's, as C++ sees it."""
    return device_for_cpp(tensor) if _in_compiled or tensor.fake_mode.in_kernel_invocation else tensor.fake_device


@contextmanager
def compiled(depth: int = 1) -> Iterator[None]:
    """Trace and run compiled code inside the block; with ``depth`` 0 again all other code.

    FakeTensorMode's cache has the device that a result reports to Python, so each of both has a cache of its own.
    """
    global _in_compiled
    before, _in_compiled = _in_compiled, depth
    FakeTensorMode.cache = _caches[_in_compiled > 0]
    try:
        yield
    finally:
        _in_compiled = before
        FakeTensorMode.cache = _caches[_in_compiled > 0]


@contextmanager
def creating_on_gpu() -> Iterator[None]:
    """Create tensors of C++ code that has none to go by on the GPU inside the block."""
    global _creating_on_gpu
    _creating_on_gpu = True
    try:
        yield
    finally:
        _creating_on_gpu = False


def is_creating_on_gpu() -> bool:
    """Return whether C++ code creates tensors on the GPU now."""
    return _creating_on_gpu


def in_compiled() -> bool:
    """Return whether compiled code is traced or runs now."""
    return _in_compiled > 0


def fake_tensors(values: Iterable[Any]) -> Iterator[FakeTensor]:
    """Yield the fake tensors of an operator's arguments or results, also in lists."""
    for value in values:
        if isinstance(value, FakeTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from fake_tensors(value)


def device_for_cpp(tensor: FakeTensor) -> torch.device:
    """Return the device of a tensor for C++."""
    if tensor.fake_mode.in_kernel_invocation:
        return META
    return CPU if tensor.fake_device.type == "cuda" else tensor.fake_device


def routed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's keyword arguments with the device that C++ meant: it asks for "cpu" for tensors of the GPU.

    Tensors of the host that meet one of the GPU are moved without a copy, as PyTorch does with a number.
    """
    kwargs = dict(kwargs)
    if _in_compiled:
        return kwargs
    if "generator" in kwargs:
        kwargs["generator"] = None
    tensors = [*fake_tensors(args), *fake_tensors(kwargs.values())]
    gpu = any(map(is_on_gpu, tensors))
    device = kwargs.get("device")
    if device is not None and device.type == "cuda":
        kwargs["device"] = GPU
    elif device is not None and device.type == "cpu" and not _requested_moves:
        if gpu or (not tensors and (_creating_on_gpu or torch._C._current_autograd_node() is not None)):
            kwargs["device"] = GPU
    elif device is None and gpu and "copy" not in func._schema.name:
        for tensor in tensors:
            if tensor.fake_device.type == "cpu" and tensor.dim():
                tensor.fake_device = GPU
    if gpu or kwargs.get("device") == GPU:
        for tensor in tensors:
            tensor.constant = None  # FakeTensorMode would compute with its value
    return kwargs


def install() -> None:
    """Replace what decides on a tensor's device or reads its data. Short tensors on the host keep their values."""
    fake.CONSTANT_NUMEL_LIMIT = 64
    _tell_devices()
    _name_autocast()
    torch.Tensor.to, torch.Tensor.numpy = _moved, _zeros
    torch.Tensor.cpu = lambda self, **_: _moved(self, "cpu")
    torch.Tensor.cuda = lambda self, *_, **__: _moved(self, "cuda")
    torch.Tensor.record_stream = lambda *_: None
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.is_cuda = property(lambda self: self.device.type == "cuda")
    torch.Tensor.data = property(_get_data, _replace_data)
    torch.nn.Module._apply = _apply
    torch.Generator, torch.FloatTensor = _Generator, _FloatTensor


class _Generator(torch.Generator):  # type: ignore[misc]  # torch is not followed
    """A generator of random numbers on the host, whatever the device: nothing is drawn from it."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls, "cpu")  # type: ignore[no-any-return]

    def __init__(self, device: Any = None) -> None:
        asked = torch.device("cpu" if device is None else device)
        self._device = GPU if asked.type == "cuda" else asked

    @property
    def device(self) -> torch.device:
        """The device that was asked for: code creates tensors where its generator is."""
        return self._device


class _FloatTensor(torch.Tensor):  # type: ignore[misc]  # torch is not followed
    """The old constructor of a tensor from numbers, which reads those that are tensors."""

    def __new__(cls, *args: Any) -> torch.Tensor:
        return _numbers(*([float(value) for value in each] if isinstance(each, list) else each for each in args))


def _tell_devices() -> None:
    """Answer C++'s questions for a device, also below all modes, and make subclasses of tensors as the CPU's."""
    fake.init_gpu_context = lambda *_: None
    fake._DISPATCH_META_HANDLERS[DEVICE] = lambda args: device_for_cpp(args[0])
    dispatch = FakeTensor.__torch_dispatch__.__func__

    def answered(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device_for_cpp(args[0]) if func is DEVICE else dispatch(cls, func, types, args, kwargs or {})

    FakeTensor.__torch_dispatch__ = classmethod(answered)
    if isinstance(getattr(FakeTensorMode, "avoid_device_init", None), property):
        FakeTensorMode.avoid_device_init = property(lambda _: True)
    else:
        _after(FakeTensorMode, "__init__", lambda self: setattr(self, "avoid_device_init", True))
    make = torch.Tensor._make_subclass

    def make_subclass(cls: Any, elem: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
        device = kwargs.get("device_for_backend_keys")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device_for_backend_keys"] = CPU
        return make(cls, elem, requires_grad, **kwargs)

    torch.Tensor._make_subclass = staticmethod(make_subclass)


def _after(kind: Any, name: str, then: Callable[[Any], None]) -> None:
    original = getattr(kind, name)

    def replacement(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    setattr(kind, name, replacement)


def _name_autocast() -> None:
    """Let autocast for "cuda" be the CPU's, which follows CUDA's rules inside :func:`estimate.autocast.cuda_rules`."""
    start, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
    set_dtype, default = torch.set_autocast_dtype, {"cuda": torch.float16}

    @functools.wraps(start)  # Dynamo reads its parameters
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and not args and kwargs.get("dtype") is None:
            kwargs["dtype"] = default["cuda"]
        start(self, _for_cpp(device_type), *args, **kwargs)

    def set_default(device_type: str, dtype: torch.dtype) -> None:
        if device_type == "cuda":
            default["cuda"] = dtype
        else:
            set_dtype(device_type, dtype)

    def in_force(device_type: str) -> str:
        return device_type if _in_compiled else _for_cpp(device_type)  # Dynamo sets each device's state as it was

    torch.autocast.__init__, torch.set_autocast_dtype = init, set_default
    torch.is_autocast_enabled = lambda device_type="cuda": enabled(in_force(device_type))
    torch.get_autocast_dtype = lambda device_type: dtype(in_force(device_type))
    torch.get_autocast_gpu_dtype = lambda: dtype("cpu")


def _for_cpp(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


@contextmanager
def _requested() -> Iterator[None]:
    global _requested_moves
    _requested_moves += 1
    try:
        yield
    finally:
        _requested_moves -= 1


def _moved(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace Tensor.to, for which C++ would compare its own devices."""
    if torch.overrides.has_torch_function_unary(self) and not isinstance(self, FakeTensor):
        return torch.overrides.handle_torch_function(_moved, (self,), self, *args, **kwargs)
    device, dtype, layout, copy = _wanted(args, kwargs)
    is_traced = torch.compiler.is_compiling()  # Dynamo of torch 2.6 knows no method of a class by itself
    if not isinstance(self, FakeTensor) and device != GPU and not is_traced:
        return _to(self, *args, **kwargs)
    device, dtype = device or self.device, dtype or self.dtype
    has_layout = layout in (None, torch.preserve_format) or self.is_contiguous(memory_format=layout)
    if device == self.device and dtype is self.dtype and has_layout and not copy:
        return self
    with _requested():
        return torch.ops.aten._to_copy.default(self, dtype=dtype, device=device, memory_format=layout)


def _wanted(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, bool]:
    """Return device, dtype, memory format and copy of the arguments of Tensor.to."""
    device = dtype = layout = None
    flags = [value for value in args if isinstance(value, bool)]
    for value in (*args, *(kwargs.get(name) for name in ("other", "device", "dtype", "memory_format"))):
        if isinstance(value, torch.Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, torch.memory_format):
            layout = value
        elif value is not None and not isinstance(value, bool):
            device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    copy = flags[1] if len(flags) > 1 else bool(kwargs.get("copy", False))
    return GPU if device is not None and device.type == "cuda" else device, dtype, layout, copy


def _zeros(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace Tensor.numpy: zeros in the tensor's shape."""
    if not isinstance(self, FakeTensor):
        return _numpy(self, *args, **kwargs)
    with _disable_current_modes():
        return _numpy(torch.zeros(tuple(self.shape), dtype=self.dtype))


def _replace_data(self: Any, new: Any) -> None:
    """Replace the setter of Tensor.data: the device changes with the memory."""
    if not isinstance(self, FakeTensor):
        _set_data(self, new)
        return
    with _disable_current_modes():
        _set_data(self, new)
    self.fake_device = new.fake_device


def _apply(self: Any, function: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Replace Module._apply, which cannot swap fake tensors, by one that sets ``parameter.data``."""
    for child in self.children() if recurse else ():
        child._apply(function)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                _set_parameter(self, name, parameter, function(parameter))
                if parameter.grad is not None:
                    parameter.grad = function(parameter.grad)
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = function(buffer)
    return self


def _set_parameter(module: Any, name: str, parameter: Any, new: Any) -> None:
    if new is parameter:
        return
    if isinstance(parameter, FakeTensor) and torch._has_compatible_shallow_copy_type(parameter, new):
        _replace_data(parameter, new)
    else:  # from "meta", or a postponed cast of the extension
        module._parameters[name] = torch.nn.Parameter(new, parameter.requires_grad)
