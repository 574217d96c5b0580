"""The weights that ZeRO-3 gathers from all processes while a step needs them.

Follows ``PartitionedParameterCoordinator`` of DeepSpeed (runtime/zero/partitioned_param_coordinator.py). Its first pass records
the order of the modules. Later ones gather weights before they are needed, and keep those that are needed again soon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kohya_ext.dry_run.events import Kind
from kohya_ext.dry_run.tracker import Tracker

#: Weights of as few elements stay on every GPU (``stage3_param_persistence_threshold``).
PERSISTENT = 100_000

#: Elements that are gathered before they are needed (``stage3_prefetch_bucket_size``).
PREFETCHED = 50_000_000

#: Elements beyond which nothing is gathered before it is needed (``stage3_max_live_parameters``).
MOST_LIVE = 1_000_000_000

#: Elements of the modules until its next use within which a weight stays (``stage3_max_reuse_distance``).
REUSE_DISTANCE = 1_000_000_000

#: The pool of the stream that gathers; see :class:`kohya_ext.dry_run.events.Event`.
GATHERING = -1


@dataclass(eq=False)
class _Gathering:
    """Weights that are gathered together, into one tensor if there are several."""

    weights: Sequence[Any]
    buffer: torch.Tensor
    is_split: bool = False


@dataclass(eq=False)
class GatheredWeights:
    """The weights of the modules that DeepSpeed has wrapped."""

    tracker: Tracker
    models: Sequence[Any]
    processes: int
    from_host: bool
    """Whether the parts of the weights are in host memory."""
    _order: list[Any] = field(default_factory=list)
    """The modules of a pass, in the order in which they need their weights."""
    _is_recorded: bool = False
    _at: int = 0
    _live: dict[Any, torch.Tensor] = field(default_factory=dict)
    _in_flight: dict[Any, _Gathering] = field(default_factory=dict)
    _queue: deque[tuple[Any, int]] = field(default_factory=deque)
    _fetched_for: dict[Any, int] = field(default_factory=dict)
    """A weight -> the latest place in the order that it has been gathered for."""
    _elements: int = 0
    """Elements that have been gathered in this pass, less those that were released."""
    _used_by: dict[Any, set[Any]] = field(default_factory=dict)

    @property
    def all_weights(self) -> list[Any]:
        """The weights of the models."""
        return [weight for model in self.models for weight in model.parameters()]

    def watch(self) -> None:
        """Gather the weights of each module when it runs, forward and backward."""
        for model in self.models:
            for module in model.modules():
                if _weights(module):
                    self._watch(module)

    def _watch(self, module: Any) -> None:
        remaining = 0

        def released() -> None:
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                self._release(module)

        def before(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            nonlocal remaining
            self._fetch(module)
            remaining = sum(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
            return tuple(_marked(value, released) for value in inputs)

        def after(module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
            self._release(module)
            return _marked(output, lambda: self._fetch(module))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def end_recording(self) -> None:
        """Gather weights from now on: the modules of the first pass are recorded."""
        self._is_recorded = True

    # --- a pass ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the pass of a micro-batch."""
        for weight in [*self._in_flight]:
            self._wait(weight)
            self._live.pop(weight)
        self._queue = deque((weight, at) for at, module in enumerate(self._order) for weight in _weights(module))
        self._fetched_for = {}
        self._at = self._elements = 0

    def end(self) -> None:
        """Release everything before an optimizer step."""
        self.begin()
        self._live.clear()
        self._used_by.clear()

    def keep_small(self) -> None:
        """Gather the weights that stay on every GPU, after an optimizer step."""
        weights = [weight for weight in self.all_weights if weight.numel() <= PERSISTENT]
        self._gather(weights)
        for weight in weights:
            self._wait(weight)

    def _fetch(self, module: Any) -> None:
        if not self._is_recorded:
            self._order.append(module)
            return
        needed = _weights(module)
        self._gather([weight for weight in needed if weight not in self._live and weight not in self._in_flight])
        for weight in needed:
            self._used_by.setdefault(weight, set()).add(module)
            if weight in self._in_flight:
                self._wait(weight)
        missed = {weight for weight in needed if self._fetched_for.get(weight, -1) < self._at}
        while self._queue and missed:
            weight, at = self._queue.popleft()
            self._fetched_for[weight] = at
            missed.discard(weight)
        self._prefetch()
        self._at += 1

    def _prefetch(self) -> None:
        most = min(MOST_LIVE - self._elements, PREFETCHED)
        chosen: dict[Any, None] = {}
        elements = 0
        while self._queue and elements < most:
            weight, at = self._queue.popleft()
            self._fetched_for[weight] = max(self._fetched_for.get(weight, -1), at)
            if weight not in self._live and weight not in self._in_flight and weight not in chosen:
                chosen[weight] = None
                elements += weight.numel()
        self._gather([*chosen])

    def _gather(self, weights: Sequence[Any]) -> None:
        if not weights:
            return
        parts = [-(-weight.numel() // self.processes) for weight in weights]
        with self.tracker.in_pool(GATHERING):
            buffer = self._new(sum(parts) * self.processes, weights[0])
            if self.from_host:
                _copies = [self._new(part, weights[0]) for part in parts]
        gathering = _Gathering(weights, buffer)
        for weight in weights:
            self._in_flight[weight] = gathering
            self._elements += weight.numel()

    def _wait(self, weight: Any) -> None:
        gathering = self._in_flight.pop(weight)
        if len(gathering.weights) == 1:
            self._live[weight] = gathering.buffer
        elif not gathering.is_split:
            gathering.is_split = True
            with self.tracker.in_pool(GATHERING):
                for each in gathering.weights:
                    self._live[each] = self._new(each.numel(), each)

    def _new(self, elements: int, weight: Any) -> torch.Tensor:
        tensor = torch.empty(elements, dtype=weight.dtype, device=self.tracker.device)
        self.tracker.mark([tensor], Kind.GATHERED)
        return tensor

    def _release(self, module: Any) -> None:
        if not self._is_recorded:
            return
        weights = _weights(module)
        for weight in weights:
            self._used_by.get(weight, set()).discard(module)
        released = [
            weight for weight in weights if weight.numel() > PERSISTENT and self._fetched_for.get(weight, -1) <= self._at
        ]
        passed = 0
        for other in self._order[self._at :]:
            if passed >= REUSE_DISTANCE or not released:
                break
            own = _weights(other)
            released = [weight for weight in released if all(weight is not each for each in own)]
            passed += sum(weight.numel() for weight in own)
        for weight in released:
            if weight in self._live and weight not in self._in_flight and not self._used_by.get(weight):
                del self._live[weight]
                self._elements -= weight.numel()


class _Marked(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Returns a tensor, and calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.act()
        return (*gradients, None)


def _marked(value: Any, act: Callable[[], None]) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad:
        return _Marked.apply(value, act)
    return value


def _weights(module: Any) -> list[Any]:
    """Return a module's own weights."""
    return [weight for weight in module._parameters.values() if weight is not None]
