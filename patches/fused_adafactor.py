"""Step matrices with Adafactor in three kernels, in fine-tunes with ``--fused_backward_pass`` and ``--fused_operations``.

Memory bandwidth limits Adafactor's step: upstream's operators move 126 bytes for each weight in bf16, which in a full fine-tune of
FLUX is as much as three forward passes. :mod:`kohya_ext.kernels.adafactor` moves 22, and creates one temporary tensor of a weight's
shape instead of four. Other weights, and learning rates that depend on the weights, are left to upstream's function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial, wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage
from kohya_ext.sdscripts.fingerprints import known_bodies
from kohya_ext.speed import switches

_counts: Counter[str] = Counter()


def _facts() -> Mapping[str, object]:
    return dict(_counts)


def _step_param(original: Any, settings: Settings) -> Any:
    from kohya_ext.kernels import fused

    works = switches.works(switches.FUSED_OPERATIONS, settings)

    @wraps(original)
    def adafactor_step_param(self: Any, p: Any, group: Any) -> None:
        if works() and _fits(p, group) and (kernels := fused.adafactor_kernels(p.device.type, p.dtype)) is not None:
            _counts["weights"] += 1
            _step(kernels, self.state[p], p, group)
        else:
            original(self, p, group)

    return adafactor_step_param


def _fits(weight: Any, group: Mapping[str, Any]) -> bool:
    """Return whether a weight is a matrix whose step depends on its gradient and its statistics alone."""
    gradient = weight.grad
    is_plain = group["beta1"] is None and not group["relative_step"] and not group["scale_parameter"]
    return is_plain and gradient is not None and weight.dim() == 2 and weight.is_contiguous() and gradient.is_contiguous()


def _step(kernels: Any, state: dict[str, Any], weight: Any, group: Mapping[str, Any]) -> None:
    import torch

    names = "exp_avg_sq_row", "exp_avg_sq_col"
    if not state:
        state["step"] = 0
        state.update((name, torch.zeros(size, device=weight.device)) for name, size in zip(names, weight.shape, strict=True))
    state["step"] += 1
    for name in names:  # a loaded state may have the weights' type
        state[name] = state[name].to(weight.device, torch.float32)
    state["RMS"] = kernels.step(
        weight.detach(),
        weight.grad,
        *(state[name] for name in names),
        beta=1.0 - state["step"] ** group["decay_rate"],
        eps=group["eps"][0],
        clip=group["clip_threshold"],
        rate=group["lr"],
        decay=group["weight_decay"] * group["lr"],
    )


PATCH = Patch(
    name="fused_adafactor",
    summary="step matrices with Adafactor in three kernels instead of thirty operators, in fused backward passes",
    targets=(
        Target(
            "library.adafactor_fused",
            "adafactor_step_param",
            _step_param,
            takes("self", "p", "group", exactly=True),
            body=known_bodies({"52155a41b7c7": "since v0.9"}, helpers={"copy_stochastic_": {"f6bee152ec1c": "since v0.9"}}),
        ),
    ),
    torch="2.6",
    exactness="close",
    held_to="training without it, with the same random bits: float32 weights within 1e-6",
    idea="https://arxiv.org/abs/1804.04235",
    wanted=partial(switches.is_wanted, switches.FUSED_OPERATIONS),
    facts=_facts,
    stage=Stage.FUSE,
)
