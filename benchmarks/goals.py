"""What these benchmarks are to reach, and how far they are from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, Comparison, read


@dataclass(frozen=True)
class Goal:
    """A ratio to upstream's own way that a job of the agenda must show on a GPU."""

    what: str
    ratio: float
    """At least so many times as fast as the baseline."""
    job: str
    """The result's name in results/."""
    variants: tuple[str, ...]
    """Any of them will do."""
    index: int = 0
    """Of the job's comparison."""
    no_more_memory: bool = False
    """Whether the variant may reserve no more than the baseline."""
    known: tuple[str, str, str, int] | None = None
    """What can be said without a GPU: the result, its variant, what its ratio means, the comparison's index."""


_BYTES = "fewer bytes read and written, counted"
_CHECKPOINTED = ("compiled", "fused", "patched")

GOALS = (
    Goal(
        "SDXL LoRA, 1024, batch 1, no more VRAM than upstream with checkpointing", 2.0, "sdxl-lora-step", _CHECKPOINTED,
        no_more_memory=True, known=("work-sdxl-lora-cpu", "fused", _BYTES, 0),
    ),
    Goal(
        "Lumina 2 LoRA, batch 6, checkpointing", 1.39, "lumina-lora-b6", ("compiled",),
        known=("work-lumina-lora-cpu", "fused", _BYTES, 0),
    ),
    Goal("Lumina 2 LoRA, batch 2, budget 0.5", 1.73, "lumina-lora-b2", ("budget-0.5",)),
    Goal(
        "FLUX LoRA", 1.5, "flux-lora-step", ("compiled", "fused", "budget-0.5"),
        known=("work-flux-lora-cpu", "fused", _BYTES, 0),
    ),
    Goal(
        "selective compile, cold, full depth", 10.0, "sdxl-lora-compile", ("compiled",),
        known=("compile-sdxl-lora-cpu", "compiled", "faster on a CPU, SDXL's width alone reduced", 0),
    ),
)  # fmt: skip


def table(folder: Path = FOLDER) -> Iterator[str]:
    """Yield the goals as a Markdown table."""
    yield "| goal | times upstream | on a GPU | without one |"
    yield "|---|---|---|---|"
    for goal in GOALS:
        yield f"| {goal.what} | {goal.ratio:g} | {_reached(goal, folder)} | {_known(goal, folder)} |"


def _reached(goal: Goal, folder: Path) -> str:
    comparison = _comparison(folder, goal.job, goal.index)
    if comparison is None:
        return "not measured: no GPU yet"
    ratios = _ratios(comparison)
    limit = comparison.variants[0].memory.get("reserved", 0)
    fitting = {
        variant.name: ratios[variant.name]
        for variant in comparison.variants
        if variant.name in ratios
        and variant.name in goal.variants
        and not (goal.no_more_memory and variant.memory.get("reserved", 0) > limit)
    }
    if not fitting:
        return "not reached: nothing measured fits the condition"
    best = max(fitting, key=lambda name: fitting[name])
    verdict = "reached" if fitting[best] >= goal.ratio else f"missed by {1 - fitting[best] / goal.ratio:.0%}"
    return f"{verdict}: {fitting[best]:.2f}x, {best}"


def _known(goal: Goal, folder: Path) -> str:
    if goal.known is None:
        return ""
    name, variant, meaning, index = goal.known
    comparison = _comparison(folder, name, index)
    ratio = _ratios(comparison).get(variant) if comparison is not None else None
    return "" if ratio is None else f"[{ratio:.2f}x](#{name}) {meaning}"


def _comparison(folder: Path, name: str, index: int) -> Comparison | None:
    file = folder / f"{name}.json"
    comparisons = read(file).comparisons if file.is_file() else []
    return comparisons[index] if index < len(comparisons) else None


def _ratios(comparison: Comparison) -> dict[str, Any]:
    return {name: row["ratio"]["of_medians"] for name, row in comparison.summary().items() if "ratio" in row}
