"""The Python cost of the default patches, one group after the other, on a U-Net with tiny layers and on one with wide layers.

One process takes the steps of all variants in turn, so the machine's load slows them alike. The suite counts processor time,
which on a CPU is the time of the step.
"""

from __future__ import annotations

from typing import Any

from benchmarks.families import RECIPES
from benchmarks.plan import Plan
from benchmarks.processes import WorkerError, worker
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.step import configuration, spec
from kohya_ext.errors import UserError

_WINS = ("skip_unused_gradients", "skip_unit_scaling", "single_process_reduce", "snr_lookup")
_CHECKPOINTING = "nonreentrant_checkpointing"

#: Name -> description, disabled patches.
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("no patch: upstream's code", ("*",)),
    "guards": ("all but those below", (_CHECKPOINTING, *_WINS)),
    "nonreentrant": (f"and {_CHECKPOINTING}", _WINS),
    "all": (f"and {', '.join(_WINS)}: the default", ()),
}

#: Title -> size of the reduced U-Net, side of the images.
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "every block, 16 channels wide": ({"width": 16, "every_block": True}, 128),
    "fewer blocks, 128 channels wide": ({"width": 128}, 256),
}


def measure(plan: Plan, result: Result) -> None:
    """Measure the variants at each size."""
    if plan.family_name != "sdxl-lora" or not plan.bench.reduced:
        raise UserError("patches runs reduced models of sdxl-lora only; add --device cpu")
    whole = [_at(plan, result, title, reduced, side) for title, (reduced, side) in SIZES.items()]
    result.complete = all(whole)


def _at(plan: Plan, result: Result, title: str, reduced: dict[str, Any], side: int) -> bool:
    request = spec(plan, RECIPES["patched"])
    request["arguments"] += ["--resolution", f"{side},{side}"]
    about = {**configuration(plan), **reduced, "arguments": request["arguments"]}
    variants = [Variant(name, meaning, ["--disable_patch", ",".join(without)]) for name, (meaning, without) in VARIANTS.items()]
    comparison = Comparison(f"patches: {title}", "processor seconds a step", about, variants)
    result.comparisons.append(comparison)
    with worker(plan.bench, "patches", {**request, **reduced}) as process:
        try:
            process.ask()
            for variant in variants:
                _steps(process, variant, 2)
            for _ in plan.turns():
                for variant in variants:
                    variant.rounds.append(_steps(process, variant, plan.steps))
                plan.save()
            before = _recomputed(process)
            _steps(process, variants[-1], 1)
            about["recomputed_blocks_a_step"] = _recomputed(process) - before
        except WorkerError as error:
            for variant in variants:
                variant.status, variant.reason = "failed", str(error)
    plan.save()
    return comparison.is_whole(plan.rounds)


def _steps(process: Any, variant: Variant, count: int) -> list[float]:
    answer = process.ask({"do": "steps", "count": count, "without": VARIANTS[variant.name][1]})
    seconds: list[float] = answer["processor_seconds"]
    return seconds


def _recomputed(process: Any) -> int:
    facts: dict[str, dict[str, int]] = process.ask({"do": "facts"})["facts"]
    return facts[_CHECKPOINTING]["recomputed_blocks"]
