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

#: Name -> what it is, and the patches it is without.
LADDER: dict[str, tuple[str, tuple[str, ...]]] = {
    "upstream": ("upstream, checkpointing", ("*",)),
    "gradients": ("patched without needless_scaling", ("needless_scaling",)),
    "patched": ("patched, eager, checkpointing", ()),
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
    told = {"work": "count", "script": plan.family.script, "arguments": plan.arguments(RECIPES["patched"])}
    counted: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for name, (_, without) in LADDER.items():
        try:
            counted[name] = ask_once(plan.bench, name, {**told, "without": without})
        except WorkerError as error:
            failed[name] = str(error)
    for quantity, (unit, one) in QUANTITIES.items():
        variants = []
        for name, (meaning, without) in LADDER.items():
            variant = Variant(name, meaning, ["--disable_patch", ",".join(without)] if without else [])
            if name in failed:
                variant.status, variant.reason = "failed", failed[name]
            else:
                variant.rounds.append([counted[name][quantity] / one])
                variant.facts["operators"] = counted[name]["operators"] if quantity == "moved_bytes" else {}
            variants.append(variant)
        title = f"{unit}: {plan.family_name}"
        result.comparisons.append(Comparison(title, unit, configuration(plan), variants))
    result.complete = not failed
