"""Step the weights of an optimizer one at a time, with the optimizer's own ``step`` and state.

``step`` of almost every optimizer treats each weight by itself, and passes over weights without a gradient. So a weight can
be stepped as soon as it has its gradient: ``param_groups`` then has this weight alone. Values that a group counts once a step,
such as the ``k`` of schedule-free optimizers, are read from a copy of the group, so each weight sees those of the step before.
A last call of ``step``, when no weight has a gradient any more, counts them.

PyTorch's tutorial has an optimizer for each weight instead. With one, schedulers and saved states stay as they are:
https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kohya_ext.optimizers import master_weights
from kohya_ext.optimizers.master_weights import LOWER
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding

if TYPE_CHECKING:
    from kohya_ext.optimizers.host_states import HostStates

FusedStep = Callable[[Any, Any, Mapping[str, Any], StochasticRounding], bool]
"""A function of an optimizer, a weight, its options and their rounding."""

PART = 2**22
"""Elements of a bf16 weight that are stepped together, if the optimizer treats each element by itself."""

_CHUNK = 2**28
"""Bytes of weights whose states are allocated together."""

_ALIGNED = 256
"""Elements to which the place of a state is aligned: 512 bytes, as by PyTorch's allocator."""


class WeightSteps:
    """Steps of an optimizer for one weight at a time."""

    def __init__(self, optimizer: Any, host: HostStates | None = None) -> None:
        """``host`` keeps the states between steps."""
        self.optimizer, self.host = optimizer, host
        self._group_of = {weight: number for number, group in enumerate(optimizer.param_groups) for weight in group["params"]}

    def step(self, weight: Any) -> None:
        """Step a weight with its gradient, and drop that."""
        with self._state_on_gpu(weight):
            self.step_in_place_of(weight, weight)
        weight.grad = None

    def _is_on_host(self, weight: Any) -> bool:
        return self.host is not None and weight in self.host.moved

    @contextlib.contextmanager
    def _state_on_gpu(self, weight: Any) -> Iterator[None]:
        """Have a weight's state on the GPU inside the block."""
        if self.host is None or weight not in self.host.moved:
            yield
            return
        states = self.optimizer.state
        kept = states.get(weight, {})
        states[weight] = self.host.fetch(weight, states)
        try:
            yield
        except BaseException:
            states[weight] = kept
            raise
        states[weight] = self.host.store(weight, kept, states[weight])

    def step_in_place_of(self, weight: Any, stand_in: Any) -> None:
        """Step a tensor with its own gradient and state, and with the options of a weight."""
        step_groups(self.optimizer, [{**self.group(weight), "params": [stand_in]}])

    def group(self, weight: Any) -> Mapping[str, Any]:
        """Return the options of a weight."""
        group: Mapping[str, Any] = self.optimizer.param_groups[self._group_of[weight]]
        return group


class RoundedSteps(WeightSteps):
    """The same with bf16 weights stepped in float32 and rounded stochastically, or with master weights.

    So are states that the optimizer keeps in the weight's own type: between two steps they are bf16. All other states are the
    optimizer's own. An optimizer that treats each element by itself steps large weights in parts, because the float32 copies of
    a weight, its gradient and its states would take more memory than anything else in the step.
    """

    def __init__(
        self,
        optimizer: Any,
        rounding: StochasticRounding,
        rounded_states: frozenset[str],
        part: int | None,
        host: HostStates | None = None,
        fused: FusedStep = lambda *_: False,
        masters: bool = False,
    ) -> None:
        """``rounded_states``: names of states of the weight's type. ``part``: elements stepped together; None for all.

        ``fused`` steps and rounds a weight without float32 copies, and returns False where it does not support that.
        ``masters``: keep the bits of each weight that rounding drops, as a state.
        """
        super().__init__(optimizer, host)
        self._rounding, self._rounded, self._part, self._fused = rounding, rounded_states, part, fused
        self._masters = masters
        self._reserved: dict[tuple[Any, str], Any] = {}
        """(weight, name) -> memory of a state that the first step creates."""

    def reserve(self, weights: Iterable[Any]) -> None:
        """Move the states that stay on the GPU to memory without gaps, and allocate it for those to come, of a weight's shape.

        The first steps would allocate them between temporary tensors of all sizes, and leave gaps that nothing fits into.
        """
        names = sorted(self._rounded) if self._part is not None else []
        on_gpu = (weight for weight in weights if _is_rounded_weight(weight) and not self._is_on_host(weight))
        for together in _chunks(on_gpu):
            for name in [*names, LOWER] if self._masters else names:
                self._reserve(name, together)

    def _reserve(self, name: str, weights: Sequence[Any]) -> None:
        import torch

        for weight, memory in zip(weights, _memory(weights, self._rounding.device), strict=True):
            memory = memory.view(torch.int16).zero_() if name == LOWER else memory
            state = self.optimizer.state.get(weight, {})
            if name in state:
                memory.copy_(state[name])
                state[name] = memory
            else:
                self._reserved[weight, name] = memory

    def step(self, weight: Any) -> None:
        """Step a weight with its gradient, and drop that."""
        if not _is_rounded_weight(weight):
            super().step(weight)
            return
        with self._state_on_gpu(weight):
            states = self.optimizer.state
            if self._masters and LOWER not in states.get(weight, {}):
                states[weight][LOWER] = self._no_bits(weight)
            if self._fused(self.optimizer, weight, self.group(weight), self._rounding):
                weight.grad = None
                return
            before, gradient, weight.grad = states.get(weight, {}), weight.grad, None
            after = {LOWER: before[LOWER]} if self._masters else {}
            for part in self._parts(weight):
                self._step_part(weight, gradient, part, before, after)
            states[weight] = after

    def _no_bits(self, weight: Any) -> Any:
        """Return the lower halves of a weight that has not been stepped."""
        import torch

        reserved = self._reserved.pop((weight, LOWER), None)
        return torch.zeros_like(weight, dtype=torch.int16, requires_grad=False) if reserved is None else reserved

    def _parts(self, weight: Any) -> Sequence[slice | None]:
        """Return the parts of the weight's elements, or None for all of it."""
        if self._part is None or not weight.is_contiguous() or weight.numel() <= self._part:
            return [None]
        return [slice(start, start + self._part) for start in range(0, weight.numel(), self._part)]

    def _step_part(
        self, weight: Any, gradient: Any, part: slice | None, before: Mapping[str, Any], after: dict[str, Any]
    ) -> None:
        """Step a part with the states of before the step, and write the new ones to ``after``."""
        import torch

        states = self.optimizer.state
        kept, lower = _of(weight.detach(), part), _of(after[LOWER], part) if self._masters else None
        stand_in = torch.nn.Parameter(kept.float() if lower is None else master_weights.joined(kept, lower))
        stand_in.grad = _of(gradient, part).float()
        states[stand_in] = {name: self._opened(name, value, part) for name, value in before.items() if name != LOWER}
        try:
            self.step_in_place_of(weight, stand_in)
            stepped = states[stand_in]
        finally:  # an error leaves only what a saved state can contain
            states.pop(stand_in, None)
        stand_in.grad = None
        for name, value in stepped.items():
            if self._is_rounded(name, value):
                if name not in after:
                    after[name] = before[name] if name in before else self._created(weight, name, value, part)
                self._rounding.copy(_of(after[name], part), value)
            else:
                after[name] = value
        if lower is None:
            self._rounding.copy(kept, stand_in.detach())
        else:
            master_weights.split(stand_in.detach(), kept, lower, self._rounding.bits(stand_in))

    def _created(self, weight: Any, name: str, value: Any, part: slice | None) -> Any:
        """Return the memory of a new state."""
        reserved = self._reserved.pop((weight, name), None)
        return _in_bf16(value if part is None else weight) if reserved is None else reserved

    def _opened(self, name: str, value: Any, part: slice | None) -> Any:
        """Return a state for a part: in float32 if it is rounded, and a counter of its own."""
        if self._is_rounded(name, value):
            return _of(value, part).float()
        return value.clone() if part is not None and hasattr(value, "clone") else value

    def _is_rounded(self, name: str, value: Any) -> bool:
        return name in self._rounded and hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _is_rounded_weight(weight: Any) -> bool:
    import torch

    return weight.dtype is torch.bfloat16


def _chunks(weights: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of weights whose states are allocated together: large ones, of which a second copy is small."""
    together: list[Any] = []
    for weight in weights:
        together.append(weight)
        if sum(each.nbytes for each in together) >= _CHUNK:
            yield together
            together = []
    if together:
        yield together


def _memory(weights: Sequence[Any], device: Any) -> list[Any]:
    """Return bf16 tensors with the shapes of weights, in one piece of memory on a device.

    It is the GPU, also for a weight of a swapped block, which is on the host until it is stepped.
    """
    import torch

    sizes = [-(-weight.numel() // _ALIGNED) * _ALIGNED for weight in weights]
    whole = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device)
    return [part[: weight.numel()].view(weight.shape) for weight, part in zip(weights, whole.split(sizes), strict=True)]


def _in_bf16(tensor: Any) -> Any:
    """Return memory for a tensor of a shape, in bf16."""
    import torch

    return torch.empty_like(tensor, dtype=torch.bfloat16, requires_grad=False)


def _of(tensor: Any, part: slice | None) -> Any:
    """Return a part of a tensor's elements."""
    return tensor if part is None else tensor.view(-1)[part]


def step_groups(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Call an optimizer's ``step`` with other parameter groups."""
    own, optimizer.param_groups = optimizer.param_groups, groups
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = own


def prepare(optimizer: Any) -> None:
    """Let an optimizer do now what it does once for all weights: bitsandbytes moves a loaded state to the GPU.

    Nothing is stepped or counted. Raises what ``step`` raises.
    """
    step_groups(optimizer, [dict(group) for group in optimizer.param_groups])


@contextlib.contextmanager
def without_states(optimizer: Any) -> Iterator[None]:
    """Take an optimizer's states away inside the block, so that it does not move them."""
    own, optimizer.state = optimizer.state, defaultdict(dict)
    try:
        yield
    finally:
        optimizer.state = own
