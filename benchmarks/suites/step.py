"""The model step: U-Net or DiT, LoRA network, optimizer and autocast as sd-scripts composes them, without a data loader."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.families import STEP, Recipe
from benchmarks.plan import Plan
from benchmarks.processes import Worker, WorkerError, ask_once, worker
from benchmarks.results import Comparison, Result, Variant

#: Steps before the measured rounds: the first compiles, the next ones settle clocks.
WARM_UP = 3

#: Further steps with an emptied allocator cache, so that only the memory of the steps is reserved.
SETTLING = 2


def measure(plan: Plan, result: Result) -> None:
    """Measure the variants of ``step``."""
    result.complete = compare(plan, result, STEP, "model step")


def compare(plan: Plan, result: Result, default: tuple[str, ...], title: str) -> bool:
    """Measure variants of the model step in turn; return whether all rounds were done."""
    chosen = plan.recipes(default)
    comparison = Comparison(
        f"{title}: {plan.family_name}", "seconds a step", configuration(plan), [variant for _, variant in chosen]
    )
    result.comparisons.append(comparison)
    with ExitStack() as stack:
        running = _start(plan, chosen, stack)
        for variant, process in running:
            _guarded(variant, _warm_up, process)
            plan.save()
        for _ in plan.turns():
            for variant, process in running:
                if variant.status == "measured":
                    _guarded(variant, _round, process, plan.steps)
            plan.save()
        for variant, process in running:
            if variant.status == "measured":
                _guarded(variant, _facts, process)
                _profile(variant, process)
    comparison.flops = _flops(plan)
    plan.save()
    return comparison.is_whole(plan.rounds)


def configuration(plan: Plan) -> dict[str, Any]:
    """Return the settings of all variants."""
    return {
        "family": plan.family_name,
        "script": plan.family.script,
        "arguments": plan.arguments(),
        "batch": int(plan.value("train_batch_size", "1")),
        "rounds": plan.rounds,
        "samples_a_round": plan.steps,
        "warm_up_steps": WARM_UP + SETTLING,
    }


def spec(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Return the specification of a worker."""
    return {"work": "step", "script": plan.family.script, "arguments": plan.arguments(recipe), "patched": recipe.patched}


def _start(plan: Plan, chosen: list[tuple[Recipe, Variant]], stack: ExitStack) -> list[tuple[Variant, Worker]]:
    """Start the workers. They prepare at the same time on a GPU, and one by one on a CPU."""
    started = []
    for recipe, variant in chosen:
        if variant.status == "measured":
            shape = plan.family.shape if plan.bench.reduced else {}
            process = stack.enter_context(worker(plan.bench, variant.name, {**spec(plan, recipe), **shape}))
            started.append((variant, process))
            if plan.bench.device == "cpu":
                _guarded(variant, _prepare, process)
    if plan.bench.device == "cuda":
        for variant, process in started:
            _guarded(variant, _prepare, process)
    return [(variant, process) for variant, process in started if variant.status == "measured"]


def _guarded(variant: Variant, work: Callable[..., None], *arguments: Any) -> None:
    """Run a worker's part; an error marks its variant as failed."""
    try:
        work(variant, *arguments)
    except WorkerError as error:
        variant.status, variant.reason = "failed", str(error)


def _prepare(variant: Variant, process: Worker) -> None:
    variant.warm_up.update(process.ask())


def _facts(variant: Variant, process: Worker) -> None:
    variant.facts.update(process.ask({"do": "facts"}))


def _profile(variant: Variant, process: Worker) -> None:
    try:
        summary = process.ask({"do": "profile"})
    except WorkerError as error:  # the measured rounds stay valid
        variant.facts["profile"] = {"failed": str(error)}
        return
    if "allocated" in summary:
        variant.memory["allocated"] = summary.pop("allocated")
    variant.facts["profile"] = summary


def _warm_up(variant: Variant, process: Worker) -> None:
    answer = process.ask({"do": "steps", "count": WARM_UP})
    process.ask({"do": "steps", "count": SETTLING, "clear": True})
    variant.warm_up.update(first_steps_seconds=answer["seconds"], compiled=answer["compiled"])


def _round(variant: Variant, process: Worker, steps: int) -> None:
    answer = process.ask({"do": "steps", "count": steps})
    variant.rounds.append(answer["seconds"])
    for name, peak in answer["memory"].items():
        variant.memory[name] = max(peak, variant.memory.get(name, 0))
    variant.facts["compiled"] = answer["compiled"]


def _flops(plan: Plan) -> int | None:
    """Return the FLOPs of a step without checkpointing, from the estimate; None where it has no model of the run."""
    about = {"work": "flops", "script": plan.family.script, "arguments": plan.arguments()}
    try:
        return int(ask_once(plan.bench, "flops", about)["flops"])
    except WorkerError:
        return None
