"""Step the weights of an optimizer one at a time, with the optimizer's own ``step`` and state.

``step`` of almost every optimizer treats each weight by itself, and passes over weights without a gradient. So a weight can be
stepped as soon as it has its gradient: ``param_groups`` then has this weight alone. Values that a group counts once a step, such
as the ``k`` of schedule-free optimizers, are read from a copy of the group, so each weight sees those of the step before. A last
call of ``step``, when no weight has a gradient any more, counts them.

The same as several optimizers of a weight each, which PyTorch's tutorial shows, but with one optimizer for the scheduler and for
saved states: https://pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kohya_ext.optimizers.stochastic_rounding import StochasticRounding

_STEPS = 8
"""Steps in which an optimizer shows whether it treats each weight by itself."""


class WeightSteps:
    """Steps of an optimizer for one weight at a time.

    With ``rounding``, a bf16 weight is stepped in float32, and rounded. So are the states in ``rounded_states``, names of states
    that the optimizer keeps in the weight's own type. All other states are the optimizer's own.
    """

    def __init__(
        self, optimizer: Any, rounding: StochasticRounding | None = None, rounded_states: frozenset[str] = frozenset()
    ) -> None:
        self._optimizer = optimizer
        self._rounding = rounding
        self._rounded = rounded_states
        self._group_of = {weight: number for number, group in enumerate(optimizer.param_groups) for weight in group["params"]}

    def step(self, weight: Any) -> None:
        """Step a weight with its gradient. The gradient stays; its values may change."""
        import torch

        if self._rounding is None or weight.dtype is not torch.bfloat16:
            self._step(weight, self._group_of[weight])
        else:
            self._step_rounded(weight, self._rounding)

    def _step_rounded(self, weight: Any, rounding: StochasticRounding) -> None:
        import torch

        states = self._optimizer.state
        before = states[weight] if weight in states else {}
        stand_in = torch.nn.Parameter(weight.detach().float())
        stand_in.grad = weight.grad.float()
        weight.grad = None
        states[stand_in] = {name: value.float() if self._is_rounded(name, value) else value for name, value in before.items()}
        try:
            self._step(stand_in, self._group_of[weight])
            after = states[stand_in]
        finally:  # an error leaves what a saved state can contain
            states.pop(stand_in, None)
        states[weight] = {name: self._narrowed(name, value, before.get(name), rounding) for name, value in after.items()}
        rounding.copy(weight.detach(), stand_in.detach())

    def _is_rounded(self, name: str, value: Any) -> bool:
        return name in self._rounded and hasattr(value, "is_floating_point") and value.is_floating_point()

    def _narrowed(self, name: str, value: Any, before: Any, rounding: StochasticRounding) -> Any:
        """Return a state after a step, in the memory that it had before, if any."""
        if not self._is_rounded(name, value):
            return value
        if before is None:
            return rounding.rounded(value)
        rounding.copy(before, value)
        return before

    def _step(self, weight: Any, number: int) -> None:
        step_groups(self._optimizer, [{**self._optimizer.param_groups[number], "params": [weight]}])


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


def states_of_the_weights_type(optimizer: Any) -> frozenset[str]:
    """Return the names of the states that an optimizer keeps in the type of a weight, and not always in float32 or 8 bits.

    Found with a step of a small bf16 weight on the host; none if the optimizer cannot do that, as bitsandbytes.
    """
    import torch

    probe = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))

    def created() -> frozenset[str]:
        probe.grad = torch.zeros_like(probe)
        step_groups(optimizer, [_usual_group(optimizer, [probe])])
        values = optimizer.state[probe].items()
        return frozenset(name for name, value in values if getattr(value, "dtype", None) is torch.bfloat16)

    try:
        return _on_the_side(optimizer, [probe], created)
    except Exception:  # an optimizer of any package
        return frozenset()


def steps_weights_separately(optimizer: Any) -> bool:
    """Return whether :class:`WeightSteps` gives the weights of the optimizer's usual steps, bit for bit.

    Found with steps of two small weights on the host, whose gradients differ in size and point the same way in every step, with
    which optimizers that estimate a rate from all of them raise it. Raises what ``step`` raises.
    """
    import torch

    together, apart = (_probes() for _ in range(2))

    def compare() -> bool:
        group = _usual_group(optimizer, together)
        other = _usual_group(optimizer, apart)
        for number in range(_STEPS):
            for weights in (together, apart):
                for place, weight in enumerate(weights):
                    weight.grad = (torch.cos(torch.arange(16.0).reshape(4, 4) + number) + 2) * 10**place
            step_groups(optimizer, [group])
            for weight in apart:
                step_groups(optimizer, [{**other, "params": [weight]}])
                weight.grad = None
            step_groups(optimizer, [other])
        return all(torch.equal(one, two) for one, two in zip(together, apart, strict=True))

    return bool(_on_the_side(optimizer, [*together, *apart], compare))


def _probes() -> list[Any]:
    import torch

    return [torch.nn.Parameter(torch.arange(16.0).reshape(4, 4) * 1e-3) for _ in range(2)]


def _usual_group(optimizer: Any, weights: Sequence[Any]) -> dict[str, Any]:
    """Return a copy of the optimizer's first group for other weights, with a rate that changes them."""
    import copy

    options = {name: copy.deepcopy(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
    rate = {} if options.get("lr") is None else {"lr": 1.0}
    return {**options, **rate, "params": [*weights]}


def _on_the_side(optimizer: Any, probes: Sequence[Any], action: Callable[[], Any]) -> Any:
    """Call an action with an optimizer's probes, and leave no state of them and all random numbers as they were."""
    import torch

    try:
        with torch.random.fork_rng(devices=[]):
            return action()
    finally:
        for probe in probes:
            optimizer.state.pop(probe, None)
