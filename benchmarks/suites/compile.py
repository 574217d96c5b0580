"""Compiling: a cold start, a second start with the compiled code kept, and what a real set of buckets costs."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.families import COMPILE
from benchmarks.plan import Plan
from benchmarks.processes import Worker, WorkerError, worker
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.step import configuration, spec

#: Width / height of the pictures people have: square, 4:3, 3:2, 16:9 and these upright.
ASPECTS = (1.0, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16)

#: Of FLUX's blocks, double and single.
FEW, ALL = (6, 12), (19, 38)


def measure(plan: Plan, result: Result) -> None:
    """Measure each compiler over a bucket set, cold and from its cache, against the whole model's compile."""
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
                    told = {**spec(plan, recipe), **_depth(plan)}
                    with worker(plan.bench, variant.name, told, TORCHINDUCTOR_CACHE_DIR=str(kept)) as one:
                        _walk(one, variant, plan.patience)
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
    """Reduced models keep their depth, which the compile of a whole model pays for: all of SDXL's blocks, many of FLUX's."""
    return {"every_block": True, "flux_blocks": ALL if plan.full_depth else FEW} if plan.bench.reduced else {}


def _where(variant: Variant, error: WorkerError) -> str:
    done = variant.facts.get("visits", [])
    return f"{error}, in bucket {len(done) + 1}" if variant.warm_up else str(error)


def _walk(one: Worker, variant: Variant, patience: float) -> None:
    """Visit each bucket: twice for the time that compiling adds, and the first again at the end."""
    variant.warm_up = one.ask()
    buckets = one.ask({"do": "buckets", "aspects": ASPECTS})["buckets"]
    visits: list[dict[str, Any]] = []
    variant.facts = {"visits": visits}
    before = {"graphs": 0, "breaks": 0}
    for bucket in [*buckets, buckets[0]]:
        answer = one.ask({"do": "steps", "count": 3, "size": bucket}, patience)
        first, *rest = answer["seconds"]
        new = {name: count - before[name] for name, count in answer["compiled"].items()}
        before = answer["compiled"]
        processor = answer["processor_seconds"]
        extra = {"processor_seconds": processor[0] - min(processor[1:])}  # this process's: a C++ compiler is another
        visits.append({"bucket": bucket, "first_seconds": first, "then_seconds": min(rest), "new": new, **extra})
    variant.rounds.append([sum(max(visit["first_seconds"] - visit["then_seconds"], 0.0) for visit in visits)])
    variant.facts = {"visits": visits, **before, **one.ask({"do": "facts"})}
