"""Step weights with Adafactor in two or three kernels, with ``--fused_operations``, and with ``--speed auto`` after its trial.

Memory bandwidth limits Adafactor's step: the usual operators move 132 bytes for each weight in bf16, which in a full
fine-tune of FLUX is more than forward and backward together. :mod:`kohya_ext.kernels.adafactor` moves 23, and creates one
temporary tensor of a weight's shape instead of four. Small weights, and rates that depend on the weights, are left to the
original functions: upstream's for ``--fused_backward_pass``, which rounds bf16 weights stochastically, and that of
transformers, which rounds to nearest. :mod:`kohya_ext.patches.gradient_release` uses the kernels, too.
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
    from kohya_ext.kernels import adafactor

    works = switches.works_in_steps(settings)

    @wraps(original)
    def adafactor_step_param(self: Any, p: Any, group: Any) -> None:
        if works() and adafactor.step(self, p, group, adafactor.random_bits):
            _counts["weights"] += 1
        else:
            original(self, p, group)

    return adafactor_step_param


def _step_all(original: Any, settings: Settings) -> Any:
    from kohya_ext.kernels import adafactor

    works = switches.works_in_steps(settings)

    @wraps(original)
    def step(self: Any, closure: Any = None) -> Any:
        if closure is not None or not works():
            return original(self, closure)
        weights = [(weight, group) for group in self.param_groups for weight in group["params"]]
        stepped = [(weight, weight.grad) for weight, group in weights if adafactor.step(self, weight, group, None)]
        _counts["weights"] += len(stepped)
        for weight, _ in stepped:
            weight.grad = None  # which the original function passes over
        try:
            return original(self)
        finally:
            for weight, gradient in stepped:
                weight.grad = gradient

    return step


PATCH = Patch(
    name="fused_adafactor",
    summary="--fused_operations: step weights with Adafactor in two or three kernels instead of thirty operators",
    targets=(
        Target(
            "library.adafactor_fused",
            "adafactor_step_param",
            _step_param,
            takes("self", "p", "group", exactly=True),
            body=known_bodies(
                {"52155a41b7c7": "since 2024-12"}, helpers={"copy_stochastic_": {"f6bee152ec1c": "since 2024-12"}}
            ),
        ),
        Target(
            "transformers.optimization",
            "Adafactor.step",
            _step_all,
            takes("self", "closure", exactly=True),
            body=known_bodies({"fc45d3498d53": "4.36 to 5.0"}, package="transformers"),
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
