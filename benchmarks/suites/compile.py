"""Compile time of a set of buckets: at a cold start, and at a second start with the compiled code cached."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.families import COMPILE
from benchmarks.plan import Plan
from benchmarks.processes import Worker, WorkerError, worker
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.step import configuration, spec

#: Width / height of common images: square, 4:3, 3:2, 16:9, landscape and portrait.
ASPECTS = (1.0, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16)

#: Number of FLUX's double and single blocks.
FEW, ALL = (6, 12), (19, 38)


def measure(plan: Plan, result: Result) -> None:
    """Measure each compiler on the buckets, cold and from its cache; the baseline compiles the whole model."""
    compilers = plan.recipes(COMPILE)
    cold = Comparison(
        "compile, cold start", "seconds of compiling", _configuration(plan), [variant for _, variant in compilers]
    )
    second = Comparison(
        "compile, second start", "seconds of compiling", _configuration(plan),
        [Variant(variant.name, variant.meaning, variant.arguments, variant.status, variant.reason) for _, variant in compilers],
    )  # fmt: skip
    result.comparisons += [cold, second]
    for number in plan.turns():
        for index, (recipe, first) in enumerate(compilers):
            kept = plan.bench.scratch / "kept" / f"{first.name}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            for comparison in (cold, second):
                variant = comparison.variants[index]
                if variant.status != "measured":
                    continue
                try:
                    request = {**spec(plan, recipe), **_depth(plan)}
                    with worker(plan.bench, variant.name, request, TORCHINDUCTOR_CACHE_DIR=str(kept)) as process:
                        _walk(process, variant, plan.patience)
                except WorkerError as error:
                    variant.status, variant.reason = "failed", _where(variant, error)
                    if comparison is cold:
                        again = second.variants[index]
                        again.status, again.reason = "left out", "it had no cold start"
                plan.save()
    result.complete = cold.is_whole(plan.rounds) and second.is_whole(plan.rounds)


def _configuration(plan: Plan) -> dict[str, Any]:
    return {**configuration(plan), **_depth(plan)}


def _depth(plan: Plan) -> dict[str, Any]:
    """Return the depth of reduced models, which the compile time of a whole model depends on."""
    return {"every_block": True, "flux_blocks": ALL if plan.full_depth else FEW} if plan.bench.reduced else {}


def _where(variant: Variant, error: WorkerError) -> str:
    done = variant.facts.get("visits", [])
    return f"{error}, in bucket {len(done) + 1}" if variant.warm_up else str(error)


def _walk(process: Worker, variant: Variant, patience: float) -> None:
    """Take three steps in each bucket, and in the first one again at the end; the first step compiles."""
    variant.warm_up = process.ask()
    buckets = process.ask({"do": "buckets", "aspects": ASPECTS})["buckets"]
    visits: list[dict[str, Any]] = []
    variant.facts = {"visits": visits}
    before = {"graphs": 0, "breaks": 0}
    for bucket in [*buckets, buckets[0]]:
        answer = process.ask({"do": "steps", "count": 3, "size": bucket}, patience)
        first, *rest = answer["seconds"]
        new = {name: count - before[name] for name, count in answer["compiled"].items()}
        before = answer["compiled"]
        processor = answer["processor_seconds"]
        extra = {"processor_seconds": processor[0] - min(processor[1:])}  # without the C++ compiler, which is another process
        visits.append({"bucket": bucket, "first_seconds": first, "then_seconds": min(rest), "new": new, **extra})
    variant.rounds.append([sum(max(visit["first_seconds"] - visit["then_seconds"], 0.0) for visit in visits)])
    variant.facts = {"visits": visits, **before, **process.ask({"do": "facts"})}
