"""Keep an optimizer's states in memory of the host, and have those of the weights that are stepped on the GPU.

Weights are stepped one after another during the backward pass, in the same order in every step. So while one is stepped, the
states of the next ones are on their way to the GPU, and those of the last ones on their way back. Both directions have a stream
of their own, and events order the copies and the kernels: the host does not wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from kohya_ext.patching.page_lock import PageLock

#: Elements of the smallest state that is moved. Smaller ones, such as counters and tables of 8-bit optimizers, stay.
_LEAST = 4096

#: Bytes of states that are on their way to the GPU or back, if more than one weight's.
_AHEAD = 2**28

#: Bytes of host memory that is allocated together, because page-locking takes as long for a small piece as for a large one.
_CHUNK = 2**28

#: Bytes between the beginnings of two tensors.
_ALIGNMENT = 256

Weight = Any
State = dict[str, Any]


class HostMemory:
    """Memory of the host for many tensors, page-locked as far as ``lock`` allows."""

    def __init__(self, lock: PageLock) -> None:
        self.lock = lock
        self.allocated = 0
        """Bytes."""
        self._free: defaultdict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        """The rest of each piece of memory, by the type of its tensors: torch.save refuses two types in one."""

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor's values."""
        size, free = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT, self._free[tensor.dtype]
        number = next((number for number, rest in enumerate(free) if rest.nbytes >= size), None)
        if number is None:
            number = len(free)
            # NumPy's, because a dry run takes what torch creates during a backward pass for the GPU's.
            free.append(torch.from_numpy(numpy.empty(max(size, _CHUNK), numpy.uint8)))
            self.allocated += free[-1].nbytes
            self.lock.lock(free[-1])
        piece, free[number] = free[number].split([size, free[number].nbytes - size])
        return piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


@dataclass(frozen=True)
class _Arrival:
    """States of a weight that are copied to the GPU."""

    state: State
    copied: Any
    """The event after the copies."""
    size: int


@dataclass
class HostStates:
    """The states of weights on one GPU.

    ``to_gpu``, ``to_host``: streams of the copies. ``ratio``: about the share of the states' bytes that are kept on the host.
    """

    device: torch.device
    to_gpu: Any
    to_host: Any
    memory: HostMemory
    ratio: float = 1.0
    moved: set[Weight] = field(default_factory=set)
    """The weights whose states are kept on the host."""
    _order: list[Weight] = field(default_factory=list)
    """The weights in the order of the last step."""
    _stepped: dict[Weight, None] = field(default_factory=dict)
    """Those of this step, in order. Their states change once more before they are stepped again."""
    _arriving: dict[Weight, _Arrival] = field(default_factory=dict)
    _leaving: deque[tuple[Any, list[torch.Tensor]]] = field(default_factory=deque)
    """(event after a weight's copies to the host, their sources)."""
    _left: dict[Weight, Any] = field(default_factory=dict)
    """Weight -> the event after its last copies to the host."""

    def choose(self, weights: Iterable[Weight]) -> None:
        """Choose the weights whose states are kept on the host, evenly among all, so that the copies have all of a pass."""
        total, chosen = 0, 0.0
        for weight in weights:
            total += weight.numel()
            if chosen + weight.numel() / 2 <= self.ratio * total:
                self.moved.add(weight)
                chosen += weight.numel()

    def fetch(self, weight: Weight, states: Mapping[Weight, State]) -> State:
        """Return a weight's state with tensors on the GPU, and begin to copy those of the weights that come next.

        ``states``: the kept state of every weight.
        """
        self._stepped[weight] = None
        arrival = self._arriving.pop(weight, None) or self._begin(weight, states.get(weight, {}))
        torch.cuda.current_stream().wait_event(arrival.copied)
        self._begin_the_next(states)
        return arrival.state

    def _begin_the_next(self, states: Mapping[Weight, State]) -> None:
        under_way = sum(arrival.size for arrival in self._arriving.values())
        for weight in self._order[len(self._stepped) :]:
            if under_way >= _AHEAD:
                return
            if weight not in self._arriving and weight not in self._stepped and weight in states:
                self._arriving[weight] = self._begin(weight, states[weight])
                under_way += self._arriving[weight].size

    def _begin(self, weight: Weight, state: State) -> _Arrival:
        kept = {name: value for name, value in state.items() if _is_moved(value)}
        copies = {name: torch.empty_like(value, device=self.device) for name, value in kept.items()}
        self.to_gpu.wait_event(torch.cuda.current_stream().record_event())  # their memory is free by then
        if weight in self._left:
            self.to_gpu.wait_event(self._left[weight])
        with torch.cuda.stream(self.to_gpu):
            for name, value in kept.items():
                copies[name].copy_(value, non_blocking=True)
            return _Arrival({**state, **copies}, self.to_gpu.record_event(), sum(each.nbytes for each in kept.values()))

    def store(self, weight: Weight, kept: State, state: State) -> State:
        """Begin to copy a weight's state to the host; return it with the host's tensors, which take the place of ``kept``."""
        moved = {name: value for name, value in state.items() if _is_moved(value)}
        places = {name: self._place(kept.get(name), value) for name, value in moved.items()}
        self.to_host.wait_event(torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self.to_host):
            for name, value in moved.items():
                places[name].copy_(value, non_blocking=True)
            self._left[weight] = self.to_host.record_event()
        self._leaving.append((self._left[weight], [*moved.values()]))
        self._free(_AHEAD)
        return {**state, **places}

    def _place(self, kept: Any, value: torch.Tensor) -> torch.Tensor:
        if kept is not None and kept.device.type == "cpu" and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            return torch.as_tensor(kept)
        return self.memory.empty_like(value)

    def _free(self, left: int) -> None:
        """Free the memory of states on their way to the host, but for some bytes, for the kernels that are launched next."""
        while self._leaving and sum(tensor.nbytes for _, tensors in self._leaving for tensor in tensors) > left:
            torch.cuda.current_stream().wait_event(self._leaving.popleft()[0])

    def adopt(self, optimizer: Any) -> None:
        """Move an optimizer's states, which a run resumes with, to the host's memory, and small ones and others to the GPU."""
        for weight, name, value in states_on_gpu(optimizer):
            is_moved = weight in self.moved and _is_moved(value)
            moved = self.memory.empty_like(value).copy_(value) if is_moved else value.to(self.device)
            optimizer.state[weight][name] = moved

    def end_step(self) -> None:
        """Take the order of this step for the next one, and let the next forward pass have the memory of this step's states."""
        self._free(0)
        if self._stepped:
            self._order, self._stepped = [*self._stepped], {}

    def drain(self) -> None:
        """Wait until nothing is copied any more, so that the host's states can be read."""
        self.to_gpu.synchronize()
        self.to_host.synchronize()
        self._leaving.clear()


def _is_moved(value: Any) -> bool:
    """Return whether a state is moved. bitsandbytes' paged ones are the driver's to move."""
    return isinstance(value, torch.Tensor) and value.numel() >= _LEAST and not getattr(value, "is_paged", False)


def states_on_gpu(optimizer: Any) -> Iterator[tuple[Weight, str, torch.Tensor]]:
    """Yield (weight, name, tensor) for the states that an optimizer has on the GPU: most count steps on the host.

    A loaded state is on the host for the weights of swapped blocks, which are there while a run resumes. Those of bitsandbytes
    that are paged are the driver's to move.
    """
    for group in optimizer.param_groups:
        counts_on_gpu = group.get("fused") or group.get("capturable")
        for weight in group["params"]:
            for name, value in [*optimizer.state.get(weight, {}).items()]:
                is_moved = isinstance(value, torch.Tensor) and not getattr(value, "is_paged", False)
                if is_moved and (name != "step" or counts_on_gpu):
                    yield weight, name, value
