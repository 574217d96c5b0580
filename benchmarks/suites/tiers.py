"""Every preset of a family through the real script, in a process capped to the memory of the card it is made for."""

from __future__ import annotations

from typing import cast

from benchmarks import models
from benchmarks.plan import Plan
from benchmarks.results import Comparison, Result, Variant
from benchmarks.suites.script import train
from kohya_ext.config import preset_files
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.units import GIB


def measure(plan: Plan, result: Result) -> None:
    """Run the presets one after another; a preset that does not fit has failed."""
    names = [name for family, name, _ in preset_files.shipped() if family == plan.family_name]
    presets = [preset for preset in preset_files.load(names, plan.family.script).presets if "vram_gb" in preset.about]
    rows = [
        Variant(preset.name, f"{preset.name}: {preset.about['summary']}", ["--preset", preset.name], facts=_card(plan, preset))
        for preset in presets
    ]
    comparison = Comparison(
        f"tiers: {plan.family_name}", "seconds a step",
        {"family": plan.family_name, "script": plan.family.script, "arguments": [*_reduced(plan), *plan.more],
         "rounds": plan.rounds, "capped": not plan.bench.reduced},
        rows,
        is_against_first=False,
    )  # fmt: skip
    result.comparisons.append(comparison)
    models.prepare(plan)
    for preset, row in zip(presets, rows, strict=True):
        if plan.bench.reduced and any(name.startswith("fp8") for name in preset.values):
            row.status, row.reason = "left out", "norms in fp8 need a GPU's autocast"
    for number in plan.turns():
        for preset, row in zip(presets, rows, strict=True):
            if row.status != "measured":
                continue
            start = ["-m", "benchmarks.capped", str(row.facts["cap_bytes"]), "--sd-scripts", str(plan.bench.checkout.path)]
            own = ["--preset", preset.name, *_reduced(plan), *plan.more]
            output = plan.bench.scratch / "runs" / f"{preset.name.replace('/', '-')}-{number}"
            said = preset_files.load([preset.name], plan.family.script).values  # its own, and those it extends
            train(plan, row, output, [*start, plan.family.script], own, leave_out=set(said))
            plan.save()
    result.complete = comparison.is_whole(plan.rounds)


def _card(plan: Plan, preset: preset_files.Preset) -> dict[str, object]:
    card = cast(int, preset.about["vram_gb"]) * GIB
    return {"card_bytes": card, "cap_bytes": card - CONTEXT_BYTES, "peak_said": preset.about.get("peak_gb")}


def _reduced(plan: Plan) -> list[str]:
    """What a preset may not say on a CPU with tiny models; its precision and all else stay its own."""
    return ["--resolution", "256,256", "--train_batch_size", "1"] if plan.bench.reduced else []
