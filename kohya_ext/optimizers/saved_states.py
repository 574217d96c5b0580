"""Load an optimizer's saved states: on the host, in the right types, and without the states of an option that is off.

PyTorch casts each loaded state to the type of its weight. That suits states that an optimizer keeps in this type, such as
AdamW's averages, also where the weights had another type when they were saved. It would round states that are always float32,
such as Adafactor's averages for bf16 weights, and ruin bits that are stored as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kohya_ext.optimizers import probes
from kohya_ext.optimizers.master_weights import LOWER


def load_on_host(optimizer: Any, load: Callable[[Any], None], saved: Any) -> None:
    """Load a saved state with an optimizer's own ``load``, which would move all of it to the devices of the weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    stand_ins = {weight: torch.nn.Parameter(torch.empty(0, dtype=weight.dtype)) for weight in weights}
    own = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [stand_ins[weight] for weight in group["params"]]
    try:
        load(saved)
    finally:
        for group, params in zip(optimizer.param_groups, own, strict=True):
            group["params"] = params
        for weight, stand_in in stand_ins.items():
            if stand_in in optimizer.state:
                optimizer.state[weight] = optimizer.state.pop(stand_in)


def load(optimizer: Any, own_load: Callable[[Any], None], saved: Any, masters: bool) -> None:
    """Load a saved state with an optimizer's ``own_load``, in the types in which the optimizer keeps its states.

    ``masters``: keep the lower halves of master weights. Without ``--master_weights`` no step would update them, and a later
    resume with it would train the weights of long ago. An optimizer that saves its state in another form than PyTorch's keeps
    what it loads.
    """
    own_load(saved)
    _restore_types(optimizer, saved)
    if not masters:
        for state in optimizer.state.values():
            if isinstance(state, dict):
                state.pop(LOWER, None)


def _restore_types(optimizer: Any, saved: Any) -> None:
    """Put the saved values back where the load has lost digits of them, but for states of the weight's own type."""
    numbers = [number for group in saved.get("param_groups", ()) for number in group["params"]]
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if len(numbers) != len(weights) or "state" not in saved:
        return
    following = None
    for number, weight in zip(numbers, weights, strict=True):
        of_file, state = saved["state"].get(number, {}), optimizer.state.get(weight, {})
        for name in state.keys() & of_file.keys():
            restored = torch.utils._pytree.tree_map(_with_all_digits, state[name], of_file[name])
            if _leaves(restored) == _leaves(state[name]):
                continue
            if following is None:  # asked only here, because it takes a step of the optimizer
                following = probes.states_of_the_weights_type(optimizer)
            if name not in following:
                state[name] = restored


def _leaves(value: Any) -> list[int]:
    """Return what tells one tensor, or those in lists, from others of equal values."""
    return [id(leaf) for leaf in torch.utils._pytree.tree_leaves(value)]


def _with_all_digits(loaded: Any, of_file: Any) -> Any:
    """Return the loaded tensor, or that of the file if the loaded one has fewer digits."""
    if not isinstance(loaded, torch.Tensor) or not isinstance(of_file, torch.Tensor) or loaded.dtype is of_file.dtype:
        return loaded
    are_floats = loaded.is_floating_point() and of_file.is_floating_point()
    is_wider = are_floats and torch.promote_types(loaded.dtype, of_file.dtype) is loaded.dtype
    return loaded if is_wider else of_file.to(loaded.device)
