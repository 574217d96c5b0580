"""What a training step allocates: every storage, when it came, when it went, and what it was for.

A :class:`Tracker` stands above FakeTensorMode (or above real tensors) as a dispatch mode. A storage is seen when an operator
first returns it and gone when its last tensor is, so the log is that of the tensors themselves, without any allocator.
"""

from __future__ import annotations

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

from kohya_ext.estimate.events import Event, Kind

#: What tensors made in a phase are for, unless they turn out to be gradients, optimizer state or saved for backward.
FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"

_aten = torch.ops.aten

#: Two of three calls that reach a mode above fake tensors are autograd and autocast asking where a tensor is. The answer is on
#: it: the modes below would say the same, in a third of an estimate's time.
DEVICE = torch.ops.prim.device.default


@dataclass
class _Storage:
    """One storage that is alive, and the event that said so."""

    number: int
    reference: weakref.ref[Any]


@dataclass
class Tracker(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Logs allocations and frees as :class:`Event` and counts FLOPs."""

    events: list[Event] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    """The kind of each storage, by its number."""
    flops: int = 0
    phase: str = FORWARD
    _live: dict[int, _Storage] = field(default_factory=dict)
    _looks_away: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Log what happens inside as belonging to a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def mark(self, tensors: Iterable[Any], kind: Kind) -> None:
        """Say what some tensors are; those not seen before are logged as allocated now."""
        for tensor in tensors:
            self.kinds[self._see(tensor, kind)] = kind

    def leave_out(self, tensors: Iterable[Any]) -> None:
        """Say that some tensors lie somewhere else: they are seen, and weigh nothing."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[id(storage)] = _Storage(len(self.kinds), weakref.ref(storage))
            self.kinds.append(Kind.TEMPORARY)

    def mark_saved(self) -> None:
        """Call between forward and backward: what forward made and is still alive is kept for backward."""
        for storage in self._live.values():
            if self.kinds[storage.number] is Kind.TEMPORARY:
                self.kinds[storage.number] = Kind.ACTIVATION

    def compact(self, away: Iterable[Any] = ()) -> int:
        """Forget what came and went so far; return the number of events left, one for each storage that is alive.

        The storages of the tensors in ``away`` are forgotten as well: they lie somewhere else.
        """
        gone = {self._live[id(tensor.untyped_storage())].number for tensor in away}
        kept = sorted(storage.number for storage in self._live.values() if storage.number not in gone)
        sizes = {event.storage: event.bytes for event in self.events if event.bytes > 0}
        self.events[:] = [Event(number, sizes[number], self.phase) for number in kept if number in sizes]
        return len(self.events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and log the storages it returns for the first time."""
        if func is DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        if not self._looks_away:
            self.see(result, self._kind_of(func, args))
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: dynamo traces below it."""
        return True

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Count FLOPs inside and log nothing but what :meth:`see` is told."""
        before, self._looks_away = self._looks_away, True
        try:
            yield
        finally:
            self._looks_away = before

    def see(self, made: Any, kind: Kind) -> None:
        """Log the storages, among some values, that are seen for the first time."""
        for value in tree_iter(made):
            if isinstance(value, torch.Tensor):
                self._see(value, kind)

    def _kind_of(self, func: Any, args: Any) -> Kind:
        if self.phase == BACKWARD:
            # Inside backward, gradients are on only where checkpointing runs a forward again.
            return Kind.RECOMPUTED if torch.is_grad_enabled() else Kind.TEMPORARY
        if func is _aten._to_copy.default and torch.is_autocast_cache_enabled() and self._is_weight(args[0]):
            return Kind.WEIGHT_COPY
        return Kind.TEMPORARY

    def _is_weight(self, tensor: Any) -> bool:
        storage = self._live.get(id(tensor.untyped_storage()))
        return storage is not None and self.kinds[storage.number] in (Kind.WEIGHT, Kind.TRAINED_WEIGHT)

    def _see(self, tensor: Any, kind: Kind) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._live.get(key)
        if known is not None and known.reference() is storage:
            return known.number
        number = len(self.kinds)
        self.kinds.append(kind)
        size = storage.nbytes()
        self._live[key] = _Storage(number, weakref.ref(storage, partial(self._gone, key, number, size)))
        self.events.append(Event(number, size, self.phase))
        return number

    def _gone(self, key: int, number: int, size: int, reference: Any) -> None:
        if self._live.get(key) is not None and self._live[key].number == number:
            del self._live[key]
        self.events.append(Event(number, -size, self.phase))

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.flops += _flops(func, args, kwargs, result)


class Allocations(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Weighs a piece of code on real tensors: what it allocates, how much of it is alive at most, and its FLOPs.

    A tensor that shares the storage of an operator's input is no allocation, so nothing that was there before need be known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes allocated inside and not freed yet; goes on falling behind the end."""
        self.peak = 0
        self.flops = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and weigh the storages that are new in its result."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += _flops(func, args, kwargs, result)
        found = [value.untyped_storage() for value in tree_iter(result) if isinstance(value, torch.Tensor)]
        if found:
            given = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor)}
            for storage in found:
                if storage._cdata not in given:
                    self._see(storage)
        return result

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as FakeTensorMode does: what is compiled stays so inside, and shows the operators it is left."""
        return True

    def _see(self, storage: Any) -> None:
        known = self._known.get(id(storage))
        if known is not None and known() is storage:
            return
        size = storage.nbytes()
        self._known[id(storage)] = weakref.ref(storage, partial(self._gone, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _gone(self, size: int, reference: Any) -> None:
        self.alive -= size


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = _FLOPS.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _sdpa_on_cpu(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _sdpa_backward_on_cpu(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    # Five matrix products where forward has two: the scores are made again.
    return int(sdpa_flop_count(query.shape, key.shape, value.shape) * 5 // 2)


#: torch's own formulas, and the CPU's flash attention, which it leaves out. FlopCounterMode itself holds tensors alive.
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_on_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward_on_cpu,
}
