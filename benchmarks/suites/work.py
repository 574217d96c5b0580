"""Kernels, bytes through memory and FLOPs of a step, with and without patches. Counted, not timed.

The count runs at full size on tensors without data. It needs no GPU, and the machine's load does not change it.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.families import RECIPES
from benchmarks.plan import Plan
from benchmarks.processes import WorkerError, ask_once
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.step import configuration

#: Name -> description, recipe of the arguments, disabled patches.
VARIANTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "upstream": ("upstream, checkpointing", "patched", ("*",)),
    "gradients": ("patched without skip_unit_scaling", "patched", ("skip_unit_scaling",)),
    "patched": (RECIPES["patched"].meaning, "patched", ()),
    "fused": (RECIPES["fused"].meaning, "fused", ()),
}

#: Counted quantity -> unit of a sample, and its size.
QUANTITIES = {
    "moved_bytes": ("GB read and written a step", 1e9),
    "kernels": ("thousand kernels a step", 1e3),
    "flops": ("TFLOP a step", 1e12),
}


def measure(plan: Plan, result: Result) -> None:
    """Count each variant once."""
    plan, result.reduced = replace(plan, bench=replace(plan.bench, reduced=False)), False
    request = {"work": "count", "script": plan.family.script}
    counted: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for name, (_, recipe, without) in VARIANTS.items():
        try:
            counted[name] = ask_once(
                plan.bench, name, {**request, "arguments": plan.arguments(RECIPES[recipe]), "without": without}
            )
        except WorkerError as error:
            failed[name] = str(error)
    for quantity, (unit, size) in QUANTITIES.items():
        variants = []
        for name, (meaning, recipe, without) in VARIANTS.items():
            more = ["--fused_operations"] if recipe == "fused" else []
            variant = Variant(name, meaning, ["--disable_patch", ",".join(without)] if without else more)
            if name in failed:
                variant.status, variant.reason = "failed", failed[name]
            else:
                variant.rounds.append([counted[name][quantity] / size])
                variant.facts["operators"] = counted[name]["operators"] if quantity == "moved_bytes" else {}
            variants.append(variant)
        title = f"{unit}: {plan.family_name}"
        result.comparisons.append(Comparison(title, unit, configuration(plan), variants))
    result.complete = not failed
