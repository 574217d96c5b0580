"""Logs of the storages that a training step allocates and frees, and their purposes.

:class:`Tracker` is a dispatch mode above FakeTensorMode (or real tensors). A storage is logged when an operator first returns
it, and freed with its last tensor, so the log is independent of any allocator.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from kohya_ext.dry_run import workspaces
from kohya_ext.dry_run.events import RELEASE, Event, Kind
from kohya_ext.dry_run.triton_kernels import CONVOLVE, MULTIPLY, convolve_flops, multiply_flops
from kohya_ext.dry_run.work import Counter, Launcher, computes

#: The phases of a step.
FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"

_aten = torch.ops.aten

#: Bytes of cuBLAS's workspace, which each thread that multiplies matrices keeps: ``:4096:2:16:8``, PyTorch's default on GPUs
#: before Hopper. https://docs.pytorch.org/docs/stable/notes/cuda.html#cublas-workspaces
WORKSPACE = (2 * 4096 + 8 * 16) * 2**10

#: Two of three calls that reach a mode above fake tensors are autograd and autocast asking for a tensor's device. Answering
#: here, instead of in the modes below, saves a third of an estimate's time.
DEVICE = torch.ops.prim.device.default


@dataclass
class _Storage:
    """A storage that is alive."""

    number: int
    reference: weakref.ref[Any]


@dataclass
class Tracker(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Logs allocations and frees as :class:`Event`, and counts FLOPs and kernels."""

    events: list[Event] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    """The kind of each storage, by its number."""
    flops: int = 0
    work: Counter = field(default_factory=Counter)
    phase: str = FORWARD
    run: Callable[[Any, Any, Any], Any] = field(default_factory=lambda: _run)
    """Runs an operator. The mode below can be called here directly, which is faster than torch's way to it."""
    _live: dict[int, _Storage] = field(default_factory=dict)
    kernels: int = 0
    """Operators that compute something, and kernels of compiled code. On a GPU nearly every operator is one kernel."""
    stream: int = 0
    """The stream that operators run on."""
    pool: int = 0
    """The pool that tensors are allocated in (:attr:`Event.pool`)."""
    device: torch.device | None = None
    """The device of tensors that the tracker creates itself."""
    workspaces: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict)
    """cuBLAS's workspaces on each stream: of autograd's thread, which runs the backward pass (True), and of the main thread."""
    _paused: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self._unshared = references_of_gradient()

    def __hash__(self) -> int:
        return id(self)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Log everything inside the block under a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def in_pool(self, pool: int) -> Iterator[None]:
        """Log allocations inside the block as those of another pool."""
        before, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = before

    def mark(self, tensors: Iterable[Any], kind: Kind) -> None:
        """Set the kind of some tensors; new ones are logged as allocated now."""
        for tensor in tensors:
            self.kinds[self._record(tensor, kind)] = kind

    def offload(self, tensors: Iterable[Any]) -> None:
        """Log tensors as freed now: they are in host memory from here on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            number = self._live[id(storage)].number
            self.events.append(Event(number, -storage.nbytes(), self.phase))
            self._live[id(storage)] = _Storage(number, weakref.ref(storage))

    def release_unused(self, pool: int = 0) -> None:
        """Log that unused segments return to the driver now: of all streams, or of a private pool, which ends."""
        self.events.append(Event(len(self.kinds) - 1, 0, RELEASE, pool))

    def mark_saved(self) -> None:
        """Mark the tensors alive after the forward pass as saved for backward. Call it before the backward pass."""
        for storage in self._live.values():
            if self.kinds[storage.number] is Kind.TEMPORARY:
                self.kinds[storage.number] = Kind.ACTIVATION

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and log the storages it returns for the first time."""
        if func is DEVICE:
            return args[0].fake_device
        return self.log(func, args, kwargs or {})

    def log(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and log the storages it returns for the first time."""
        accumulated = self._accumulated(func, args)
        result = workspaces.laid_out(func, args, kwargs, self.run(func, args, kwargs))
        self._count(func, args, kwargs, result)
        if accumulated is not None:
            self._take_over(accumulated, result)
        if not self._paused:
            used = self.allocate(*workspaces.before(func, args, kwargs))
            self.record(result, self._kind_of(func, args))
            used += self.allocate(*workspaces.after(func, args, kwargs))
            self.free(used)
        if workspaces.uses_cublas(func, args) and (handle := (self.stream, self.phase == BACKWARD)) not in self.workspaces:
            self.workspaces[handle] = torch.empty(WORKSPACE, dtype=torch.uint8, device=self.device)
            self._record(self.workspaces[handle], Kind.WORKSPACE)
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: dynamo traces below it."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count FLOPs and their kernels inside the block, and log only through :meth:`record`."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def record(self, values: Any, kind: Kind) -> None:
        """Log the storages of some values that are not in the log yet."""
        for value in (values,) if isinstance(values, torch.Tensor) else tree_iter(values):
            if isinstance(value, torch.Tensor):
                self._record(value, kind)

    def _kind_of(self, func: Any, args: Any) -> Kind:
        if self.phase == BACKWARD:
            # Inside backward, gradients are enabled only while checkpointing recomputes a forward.
            return Kind.RECOMPUTED if torch.is_grad_enabled() else Kind.TEMPORARY
        if func is _aten._to_copy.default and torch.is_autocast_cache_enabled() and self._is_weight(args[0]):
            return Kind.WEIGHT_COPY
        return Kind.TEMPORARY

    def _is_weight(self, tensor: Any) -> bool:
        storage = self._live.get(id(tensor.untyped_storage()))
        return storage is not None and self.kinds[storage.number] in (Kind.WEIGHT, Kind.TRAINED_WEIGHT)

    def _record(self, tensor: Any, kind: Kind) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._live.get(key)
        if known is not None and known.reference() is storage:
            return known.number
        number = len(self.kinds)
        self.kinds.append(kind)
        size = storage.nbytes()
        self._live[key] = _Storage(number, weakref.ref(storage, partial(self._freed, key, number, size)))
        if size:
            self.events.append(Event(number, size, self.phase, self.pool))
        return number

    def allocate(self, *sizes: int) -> list[Event]:
        """Log memory that is used for a moment, in bytes, and return its events for :meth:`free`."""
        events = [Event(len(self.kinds) + index, size, self.phase, self.pool) for index, size in enumerate(sizes) if size]
        self.kinds += (Kind.WORKSPACE for _ in sizes)
        self.events += events
        return events

    def free(self, allocated: Iterable[Event]) -> None:
        """Log that the memory of some events is free now."""
        self.events += (Event(event.storage, -event.bytes, event.phase) for event in allocated)

    def _accumulated(self, func: Any, args: Any) -> Any:
        """Return the gradient that autograd adds another one to in place; None for every other operator.

        The engine never does so under a dispatch mode. Its rule: ``can_accumulate_inplace`` in
        https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp.
        """
        if func is not _aten.add.Tensor or self.phase != BACKWARD or torch.is_grad_enabled():
            return None
        if not all(isinstance(value, torch.Tensor) for value in args) or args[0].dtype is not args[1].dtype:
            return None
        return args[0] if _references(args) == self._unshared and _is_dense(args[0]) else None

    def _take_over(self, before: Any, after: Any) -> None:
        """Log nothing for a result, which is in the memory of an input that is freed now."""
        storage, replaced = after.untyped_storage(), before.untyped_storage()
        known = self._live.get(id(replaced))
        if known is None or storage.nbytes() != replaced.nbytes() or known.reference() is not replaced:
            return
        del self._live[id(replaced)]  # its weak reference, and so the call of _freed, ends with it
        freed = partial(self._freed, id(storage), known.number, storage.nbytes())
        self._live[id(storage)] = _Storage(known.number, weakref.ref(storage, freed))

    def _freed(self, key: int, number: int, size: int, reference: Any) -> None:
        if self._live.get(key) is not None and self._live[key].number == number:
            del self._live[key]
        if size:
            self.events.append(Event(number, -size, self.phase))

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        flops = _flops(func, args, kwargs, result)
        self.flops += flops
        if flops or not self._paused:
            self.work.operator(func, args, kwargs, result, flops, self.launcher)
        self.kernels += computes(func) and not self._paused

    @property
    def launcher(self) -> Launcher:
        """What launches the kernels of an operator that runs now."""
        if self.phase == STEP:
            return Launcher.OPTIMIZER
        # Gradients are on in a recomputation, and off while the engine runs a backward function.
        by_python = not self._paused and (self.phase == FORWARD or torch.is_grad_enabled())
        return Launcher.PYTHON if by_python else Launcher.ENGINE


def _run(operator: Any, args: Any, kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def _is_dense(tensor: Any) -> bool:
    """Return whether a tensor's elements are next to each other in memory, in any order of the dimensions."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != length:
            return False
        length *= size
    return True


def _references(args: Any) -> tuple[int, int, int]:
    """Return how many references an operator's first argument, its Python object and its storage have.

    The argument is not passed alone: after torch.compile has failed, a call by Python holds one more reference to it, because
    dynamo then keeps evaluating all frames.
    """
    tensor = args[0]
    return tensor._use_count(), sys.getrefcount(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def references_of_gradient() -> tuple[int, int, int]:
    """Return the references to a gradient that only autograd holds, as a dispatch mode sees them in this version of torch."""
    seen: list[tuple[int, int, int]] = []

    class Observer(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _aten.add.Tensor:
                seen.append(_references(args))
            return func(*args, **(kwargs or {}))

    with torch.enable_grad():
        value = torch.ones(2, requires_grad=True)
        loss = (value.exp() * value.sin()).sum()
    with Observer():
        loss.backward()
    return seen[0]


class Allocations(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Counts the bytes that a block allocates on real tensors, their peak, and its FLOPs.

    A result that shares the storage of an operator's input does not count, so earlier tensors need not be known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes allocated inside the block and not freed yet; still updated after the block."""
        self.peak = 0
        self.flops = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count the new storages in its result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += _flops(func, args, kwargs, result)
        storages = [value.untyped_storage() for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        if storages:
            given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)}
            for storage in storages:
                if storage._cdata not in given:
                    self._record(storage)
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: compiled code stays compiled inside, and its remaining operators are counted."""
        return True

    def _record(self, storage: Any) -> None:
        known = self._known.get(id(storage))
        if known is not None and known() is storage:
            return
        size = storage.nbytes()
        self._known[id(storage)] = weakref.ref(storage, partial(self._freed, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _freed(self, size: int, reference: Any) -> None:
        self.alive -= size


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = _FLOPS.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _sdpa_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _sdpa_backward_on_cpu(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # Five matrix products where forward has two: the scores are recomputed.
    return int(sdpa_flop_count(query.shape, key.shape, value.shape) * 5 // 2)


#: torch's own formulas, and those that it lacks, of the CPU's flash attention and of 8-bit products. FlopCounterMode itself
#: would keep tensors alive.
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_on_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward_on_cpu,
    MULTIPLY: multiply_flops,
    CONVOLVE: convolve_flops,
}
