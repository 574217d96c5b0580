"""What a step asks of any GPU, with the patches and without: kernels, bytes through its memory, FLOPs. Counted, not timed.

At full size on tensors without data, so it needs no GPU and no machine's load changes it. How much time a card saves with
them is for the other suites; but it is never given back by a faster card.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.families import RECIPES
from benchmarks.plan import Plan
from benchmarks.processes import WorkerError, ask_once
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.step import configuration

#: Name -> what it is, the recipe whose arguments it has, and the patches it is without.
LADDER: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "upstream": ("upstream, checkpointing", "patched", ("*",)),
    "gradients": ("patched without skip_unit_scaling", "patched", ("skip_unit_scaling",)),
    "patched": (RECIPES["patched"].meaning, "patched", ()),
    "fused": (RECIPES["fused"].meaning, "fused", ()),
}

#: What is counted -> a sample's unit, and how many of what is counted are one of it.
QUANTITIES = {
    "moved_bytes": ("GB read and written a step", 1e9),
    "kernels": ("thousand kernels a step", 1e3),
    "flops": ("TFLOP a step", 1e12),
}


def measure(plan: Plan, result: Result) -> None:
    """Count each variant once."""
    plan, result.reduced = replace(plan, bench=replace(plan.bench, reduced=False)), False
    told = {"work": "count", "script": plan.family.script}
    counted: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for name, (_, recipe, without) in LADDER.items():
        try:
            counted[name] = ask_once(
                plan.bench, name, {**told, "arguments": plan.arguments(RECIPES[recipe]), "without": without}
            )
        except WorkerError as error:
            failed[name] = str(error)
    for quantity, (unit, one) in QUANTITIES.items():
        variants = []
        for name, (meaning, recipe, without) in LADDER.items():
            more = ["--fused_operations"] if recipe == "fused" else []
            variant = Variant(name, meaning, ["--disable_patch", ",".join(without)] if without else more)
            if name in failed:
                variant.status, variant.reason = "failed", failed[name]
            else:
                variant.rounds.append([counted[name][quantity] / one])
                variant.facts["operators"] = counted[name]["operators"] if quantity == "moved_bytes" else {}
            variants.append(variant)
        title = f"{unit}: {plan.family_name}"
        result.comparisons.append(Comparison(title, unit, configuration(plan), variants))
    result.complete = not failed
