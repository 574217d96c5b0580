"""Find out how an optimizer treats weights, with steps of small weights on the host.

Names tell nothing about optimizers of other packages, and a wrong guess would train wrong weights without an error.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

from kohya_ext.optimizers.weight_steps import step_groups

_STEPS = 8
"""Steps of a comparison."""

_SIDE = 8
"""Rows and columns of a small weight. Half of its elements are whole vectors of every CPU, and so computed like all of them."""

_OF_SCHEDULERS = ("_step_count", "_opt_called")
"""Attributes with which torch's schedulers count the calls of an optimizer's ``step``."""

_on_the_host: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
"""The context in which tensors have data; a dry run replaces it."""


def states_of_the_weights_type(optimizer: Any) -> frozenset[str]:
    """Return the names of the states that an optimizer keeps in the type of a weight, and not always in float32 or 8 bits.

    None if the optimizer cannot step weights on the host, as bitsandbytes.
    """
    import torch

    def created() -> list[str]:
        probes = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((_SIDE, _SIDE), (_SIDE,))]
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        step_groups(optimizer, [_usual_group(optimizer, probes)])
        values = [item for probe in probes for item in optimizer.state[probe].items()]
        return [name for name, value in values if getattr(value, "dtype", None) is torch.bfloat16]

    try:
        return frozenset(_on_the_side(optimizer, created))
    except Exception:  # an optimizer of any package
        return frozenset()


def steps_weights_separately(optimizer: Any) -> bool:
    """Return whether weights that are stepped one at a time are those of the optimizer's usual steps, bit for bit.

    Not with an optimizer whose step depends on the gradients of all weights, or that counts the calls of its ``step``: what
    depends on such a count may differ after more steps than these. Raises what ``step`` raises.
    """
    before = _own_numbers(optimizer)
    agree = _on_the_side(optimizer, lambda: _agree(optimizer, _weights(2), _weights(2)))
    return bool(agree) and _own_numbers(optimizer) == before


def steps_elements_separately(optimizer: Any, rounded_states: frozenset[str]) -> bool:
    """Return whether parts of a weight can be stepped one after the other, bit for bit as the whole weight.

    Each state must be one of ``rounded_states``, with the weight's shape, or a number. False if the optimizer cannot step
    weights on the host.
    """

    def compare() -> bool:
        (whole,) = weights = _weights(1)
        if not _agree(optimizer, weights, _halves(whole)):
            return False
        tensors = {name: value for name, value in optimizer.state[whole].items() if hasattr(value, "shape")}
        is_whole = {name for name, value in tensors.items() if value.shape == whole.shape}
        return is_whole == rounded_states & tensors.keys() and all(
            tensors[name].numel() == 1 for name in tensors.keys() - is_whole
        )

    try:
        return bool(_on_the_side(optimizer, compare))
    except Exception:  # an optimizer of any package
        return False


def _agree(optimizer: Any, together: Sequence[Any], apart: Sequence[Any]) -> bool:
    """Return whether weights stepped together are equal to weights of the same elements stepped one at a time.

    Gradients have the same signs in every step, which raises the rates that some optimizers estimate from all weights.
    """
    import torch

    group, other = (_usual_group(optimizer, weights) for weights in (together, apart))
    places = torch.arange(sum(weight.numel() for weight in together))
    for number in range(_STEPS):
        gradient = torch.cos(places + number) + 2
        for weights in (together, apart):
            _give(weights, gradient)
        step_groups(optimizer, [group])
        for weight in apart:
            step_groups(optimizer, [{**other, "params": [weight]}])
            weight.grad = None
        step_groups(optimizer, [other])
    left, right = (torch.cat([weight.detach().view(-1) for weight in weights]) for weights in (together, apart))
    return bool(torch.equal(left, right))


def _own_numbers(optimizer: Any) -> dict[Any, float]:
    """Return the numbers that an optimizer keeps for all weights, and not in their groups."""
    import torch

    own = {("attribute", name): value for name, value in vars(optimizer).items() if name not in _OF_SCHEDULERS}
    own |= {("state", key): value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {key: value for key, value in own.items() if isinstance(value, (int, float))}


def _give(weights: Sequence[Any], gradient: Any) -> None:
    """Give weights their parts of a vector as gradients."""
    parts = gradient.split([weight.numel() for weight in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.clone().view(weight.shape)


def _weights(count: int) -> list[Any]:
    import torch

    return [torch.nn.Parameter(torch.arange(float(_SIDE**2)).view(_SIDE, _SIDE) * 1e-3) for _ in range(count)]


def _halves(weight: Any) -> list[Any]:
    import torch

    return [torch.nn.Parameter(half.clone()) for half in weight.detach().view(-1).chunk(2)]


def _usual_group(optimizer: Any, weights: Sequence[Any]) -> dict[str, Any]:
    """Return a copy of the optimizer's first group for other weights, with a rate that changes them."""
    options = {name: copy.deepcopy(value) for name, value in optimizer.param_groups[0].items() if name != "params"}
    rate = {} if options.get("lr") is None else {"lr": 1.0}
    return {**options, **rate, "params": [*weights]}


def _on_the_side(optimizer: Any, action: Callable[[], Any]) -> Any:
    """Call an action, and leave the optimizer's state and all random numbers as they were."""
    import torch

    before = set(optimizer.state)
    try:
        with _on_the_host(), torch.random.fork_rng(devices=[]):
            return action()
    finally:
        for probe in set(optimizer.state) - before:
            del optimizer.state[probe]
