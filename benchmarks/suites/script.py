"""The real script, run as users run it: a round is a whole run, its samples are the steps of all but the first epoch.

Steps are timed by the wall times that the script itself writes for TensorBoard; upstream's process holds nothing of ours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from benchmarks import models
from benchmarks.families import Recipe
from benchmarks.plan import Plan
from benchmarks.processes import last_line
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.step import configuration
from kohya_ext.tiny import arguments

DEFAULT = ("upstream", "patched", "compiled")

#: Steps of an epoch: pictures of two sizes, each seen twice.
EPOCH = 2 * models.PICTURES


def measure(plan: Plan, result: Result) -> None:
    """Run the variants' scripts in turn."""
    chosen = plan.recipes(DEFAULT)
    comparison = Comparison(
        f"script: {plan.family.script}", "seconds a step",
        {**configuration(plan), "warm_up_steps": EPOCH, "samples_a_round": plan.steps},
        [variant for _, variant in chosen],
    )  # fmt: skip
    result.comparisons.append(comparison)
    models.prepare(plan)
    for number in plan.turns():
        for recipe, variant in chosen:
            if variant.status == "measured":
                output = plan.bench.scratch / "runs" / f"{variant.name}-{number}"
                train(plan, variant, output, _start(plan, recipe), plan.arguments(recipe))
                plan.save()
    result.complete = comparison.is_whole(plan.rounds)


def _start(plan: Plan, recipe: Recipe) -> list[str]:
    script = plan.family.script
    if not recipe.patched:
        return [str(plan.bench.checkout.path / script)]
    return ["-m", "kohya_ext", "--sd-scripts", str(plan.bench.checkout.path), script]


def train(
    plan: Plan, variant: Variant, output: Path, start: list[str], own: list[str], leave_out: Collection[str] = ()
) -> None:
    """Run a script for one epoch and ``plan.steps`` more steps; add its round to the variant, or why there is none.

    ``leave_out`` names options that are left open for a preset.
    """
    report = output / "report.json"
    shutil.rmtree(output, ignore_errors=True)  # an earlier call's losses are not this one's
    output.mkdir(parents=True)
    common = arguments.training_arguments(plan.family.script, models.of(plan), models.pictures(plan), output)
    command = [
        plan.bench.python, *start,
        *without(common, {"gradient_checkpointing", *leave_out}),
        *("--max_train_steps", str(EPOCH + plan.steps + 1), "--logging_dir", str(output / "log"), "--max_bucket_reso", "2048"),
        *own,
    ]  # fmt: skip
    environment = plan.bench.environment(KOHYA_EXT_REPORT=str(report), **models.variables(plan))
    if start[0] != "-m":
        del environment["KOHYA_EXT_REPORT"]
    log = output / "log.txt"
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, cwd=output, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode:
        variant.status, variant.reason = "failed", f"exit code {done.returncode}: {last_line(log)}"
        return
    seconds = [later - earlier for earlier, later in pairwise(wall_times(output / "log"))]
    variant.warm_up.setdefault("first_epoch_seconds", []).append(sum(seconds[: EPOCH - 1]))
    variant.rounds.append(seconds[EPOCH - 1 :])
    if report.is_file():
        said = json.loads(report.read_text(encoding="utf-8"))
        names = {"host_resident": "host_resident", "cuda_allocated": "allocated", "cuda_reserved": "reserved"}
        for name, peak in said["memory"].items():
            variant.memory[names[name]] = max(peak, variant.memory.get(names[name], 0))
        applied = {row["patch"] for row in said["patches"] if row["status"] == "applied"}
        variant.facts.update(patches=sorted(applied), facts=said["facts"])


def wall_times(folder: Path) -> list[float]:
    """Return when each step's loss was written, in order of steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for events in sorted(folder.rglob("events.out.tfevents.*")):
        accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
        accumulator.Reload()
        tag = next((one for one in ("loss/current", "loss") if one in accumulator.Tags()["scalars"]), None)
        if tag is not None:
            return [event.wall_time for event in accumulator.Scalars(tag)]
    raise FileNotFoundError(f"no losses in {folder}")


def without(words: Iterable[str], names: Iterable[str]) -> Iterator[str]:
    """Yield a command line's words without some options and their values. A preset fills what is left open."""
    dropped = {f"--{name}" for name in names}
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word in dropped
        if not dropping:
            yield word
