"""Run an optimizer's step without waiting for the GPU once or twice per parameter.

bitsandbytes' optimizers wait after each parameter, which only their paged state needs. Prodigy reads two sums of each
parameter, although it needs only their totals. For the 1,444 LoRA weights of SDXL this is some 1,400 and 2,900 waits a step.
Meanwhile the CPU launches nothing, so the GPU idles between two parameters.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.sdscripts.fingerprints import known_bodies

_steps = 0
"""Number of optimizer steps without a wait per parameter."""


def _facts() -> Mapping[str, object]:
    return {"steps": _steps}


# --- bitsandbytes ----------------------------------------------------------------------------------------------------

#: The function that waits, in the module of bitsandbytes' optimizers since 0.47. Before, they call torch.cuda.synchronize.
_WAIT = "sync_gpu"


class _Instead:
    """An object with some attributes of its own and all others of another object."""

    def __init__(self, other: Any, **own: Any) -> None:
        vars(self).update(own, _other=other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def _find_unknown(original: Any) -> str | None:
    unknown = takes("self", "closure", exactly=True)(original)
    waits = hasattr(sys.modules[original.__module__], _WAIT) or "synchronize" in inspect.unwrap(original).__code__.co_names
    return unknown or (None if waits else f"it calls neither {_WAIT} nor torch.cuda.synchronize")


def _wait_for_paged_state(original: Callable[..., Any], settings: Settings) -> Any:
    module = sys.modules[original.__module__]
    without = (_WAIT, lambda tensor: None) if hasattr(module, _WAIT) else ("torch", _without_waits(module.torch))

    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        global _steps
        if self.is_paged:
            return original(self, closure)
        _steps += 1
        with replaced(module, *without):
            return original(self, closure)

    return step


def _without_waits(torch: Any) -> _Instead:
    """Return PyTorch for bitsandbytes' module alone, since other threads, such as one that copies a state, must wait."""
    return _Instead(torch, cuda=_Instead(torch.cuda, synchronize=lambda: None))


# --- Prodigy ---------------------------------------------------------------------------------------------------------


def _read_totals_at_once(original: Callable[..., Any], settings: Settings) -> Any:
    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        global _steps
        if not _is_usual(self):
            return original(self, closure)
        _steps += 1
        loss = None if closure is None else closure()
        _prodigy_step(self)
        return loss

    return step


def _is_usual(optimizer: Any) -> bool:
    """Return whether every parameter with a gradient has its state and learning rate, in one process."""
    groups = optimizer.param_groups
    highest = max(group["lr"] for group in groups)
    if any(group["fsdp_in_use"] or group["lr"] not in (highest, 0.0) for group in groups):
        return False
    trained = [p for group in groups for p in group["params"] if p.grad is not None]
    return all("step" in optimizer.state[p] and not hasattr(p, "_fsdp_flattened") for p in trained)


def _prodigy_step(optimizer: Any) -> None:
    """Update the parameters as Prodigy 1.1.2 does, with the same operations in the same order on each tensor.

    https://arxiv.org/abs/2306.06101, algorithm 4; the names are those of its state.
    """
    groups = optimizer.param_groups
    first = groups[0]
    beta1, beta2 = first["betas"]
    beta3 = math.sqrt(beta2) if first["beta3"] is None else first["beta3"]
    d, k = first["d"], first["k"]
    highest = max(group["lr"] for group in groups)
    bias_correction = 1
    if first["use_bias_correction"]:
        bias_correction = ((1 - beta2 ** (k + 1)) ** 0.5) / (1 - beta1 ** (k + 1))
    rate = d * highest * bias_correction

    products, sizes, scales = [], [], []
    for group in groups:
        decay, stride, d0 = group["weight_decay"], group["slice_p"], group["d0"]
        for p, state in _trained(optimizer, group):
            gradient, weight = p.grad.data, p.data
            if decay != 0 and not first["decouple"]:
                gradient.add_(weight, alpha=decay)
            if group["lr"] > 0.0:
                part = gradient.flatten()[::stride]
                products.append(part.dot(state["p0"].data - weight.flatten()[::stride]))
                scales.append(d / d0 * rate)
                if beta1 > 0:
                    state["exp_avg"].mul_(beta1).add_(gradient, alpha=d * (1 - beta1))
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=d * d * (1 - beta2))
                growth = d / d0 * (d if group["safeguard_warmup"] else rate)
                sizes.append(state["s"].mul_(beta3).add_(part, alpha=growth).abs().sum())

    numbers = _read([*products, *sizes])
    numerator = denominator = 0.0
    for scale, product in zip(scales, numbers, strict=False):  # the sums follow the products
        numerator += scale * product
    for size in numbers[len(products) :]:
        denominator += size
    if denominator == 0:
        return
    numerator += first["d_numerator"] * beta3
    d_hat = first["d_coef"] * numerator / denominator
    if d == groups[-1]["d0"]:
        d = max(d, d_hat)
    d_max = max(first["d_max"], d_hat)
    d = min(d_max, d * first["growth_rate"])

    for group in groups:
        group |= {"d_numerator": numerator, "d_denom": denominator, "d": d, "d_max": d_max, "d_hat": d_hat}
        decay, eps = group["weight_decay"], group["eps"]
        for p, state in _trained(optimizer, group):
            state["step"] += 1
            root = state["exp_avg_sq"].sqrt().add_(d * eps)
            if decay != 0 and first["decouple"]:
                p.data.add_(p.data, alpha=-decay * rate)
            if beta1 > 0:
                p.data.addcdiv_(state["exp_avg"], root, value=-rate)
            else:
                p.data.addcdiv_(p.grad.data, root, value=-rate * d)
        group["k"] += 1


def _trained(optimizer: Any, group: Mapping[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the parameters of a group that have a gradient, and their state."""
    return [(p, optimizer.state[p]) for p in group["params"] if p.grad is not None]


def _read(scalars: list[Any]) -> list[float]:
    """Return the values of scalar tensors, waiting once for each device and dtype among them."""
    import torch

    kinds = [(scalar.device, scalar.dtype) for scalar in scalars]
    values = {
        kind: iter(torch.stack([scalar for scalar, own in zip(scalars, kinds, strict=True) if own == kind]).tolist())
        for kind in dict.fromkeys(kinds)
    }
    return [next(values[kind]) for kind in kinds]


PATCH = Patch(
    name="optimizer_syncs",
    summary="run the steps of bitsandbytes and Prodigy without waiting for the GPU once per parameter",
    targets=(
        Target(
            "bitsandbytes.optim.optimizer",
            "Optimizer8bit.step",
            _wait_for_paged_state,
            _find_unknown,
            body="runs",
            optional=True,
        ),
        Target(
            "prodigyopt.prodigy",
            "Prodigy.step",
            _read_totals_at_once,
            takes("self", "closure", exactly=True),
            body=known_bodies({"0cde6e3b8972": "1.1.2"}, package="prodigyopt"),
            optional=True,
        ),
    ),
    exactness="exact",
    held_to="the optimizers' own steps, bit-identical",
    idea="https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/optim/optimizer.py",
    facts=_facts,
)
