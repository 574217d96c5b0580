"""``python -m benchmarks.report``: write the tables of the JSON in results/ as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ratios import Ratio
from benchmarks.results import FOLDER, Comparison, Result, kept, read
from kohya_ext.console import error, note
from kohya_ext.units import GB

REPORT = "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results (all in benchmarks/results)")
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="FOLDER", help=f"for {REPORT}")
    given = parser.parse_args(argv)
    try:
        results = [(file, read(file)) for file in given.files or kept()]
    except (OSError, ValueError) as problem:
        error(str(problem))
        return 2
    if not results:
        error(f"no results in {FOLDER}: run `python -m benchmarks.run step`")
        return 2
    given.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join(_document(results))
    (given.output / REPORT).write_text(text, encoding="utf-8")
    note(str(given.output / REPORT))
    return 0


def _document(results: Sequence[tuple[Path, Result]]) -> Iterator[str]:
    yield "# Measured\n"
    yield "`python -m benchmarks.report` writes this file from the JSON files in this folder. Each section names the command"
    yield "that repeats its measurement. Times are medians, with quartiles in brackets. A ratio is the first row's median over"
    yield "the row's: above 1 is faster. The brackets hold the lowest and the highest ratio of a round. GB is 1e9 bytes."
    for file, result in results:
        yield f"\n## {file.stem}\n"
        yield from _about(result)
        for comparison in result.comparisons:
            yield f"\n### {comparison.title}\n"
            yield from table(comparison, result)
            yield from at_equal_cost(comparison)
            yield from compiling_table(comparison)
            yield from operators_table(comparison)
    yield ""


def _about(result: Result) -> Iterator[str]:
    machine = result.machine
    where = machine.get("gpu") or f"{machine['processor']}, {machine['cores']} cores, {machine.get('threads')} thread(s)"
    versions = ", ".join(
        f"{name} {result.versions[name]}" for name in ("python", "torch", "accelerate") if name in result.versions
    )
    commit = str(result.commits["kohya_ext"])[:8] + (" with changes" if result.commits["kohya_ext_changed"] else "")
    yield f"`{result.command}`\n"
    yield f"{where}; {versions}; kohya_ext {commit}; sd-scripts v{result.commits['sd_scripts_version']}; {result.date}."
    if result.reduced:
        yield "**Tiny models on a CPU.** The figures show the cost of Python, not the gain on a GPU."
    if result.note:
        yield f"Note: {result.note}."
    if not result.complete:
        yield "**Incomplete.** Time ran out before all rounds were done, or a part failed."


#: Peak -> title of its column.
MEMORY = {"allocated": "allocated GB", "reserved": "reserved GB", "host_resident": "process GB"}


def table(comparison: Comparison, result: Result) -> Iterator[str]:
    """Yield a comparison as a Markdown table."""
    rate = result.machine.get("matmul", {}).get("flops_per_second")
    measured = {name for variant in comparison.variants for name in variant.memory}
    memory = [name for name in MEMORY if name in measured and (name != "host_resident" or "allocated" not in measured)]
    batch = comparison.configuration.get("batch")
    stepping = comparison.unit == "seconds a step" and batch is not None
    titles = ["variant", comparison.unit, "ratio"]
    titles += ["images a second"] if stepping else []
    titles += [MEMORY[name] for name in memory]
    rated = bool(comparison.flops and rate and "reserved" in measured)
    titles += ["share of the device's bf16 matmul rate, without recomputation"] if rated else []
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    summary = comparison.summary()
    for variant in comparison.variants:
        row = summary.get(variant.name)
        if row is None:
            yield f"| {variant.meaning} | {variant.status}: {variant.reason} |{' |' * (len(titles) - 2)}"
            continue
        cells = [variant.meaning, _seconds(row), str(Ratio(**row["ratio"])) if "ratio" in row else ""]
        cells += [f"{batch / row['median']:.2f}"] if stepping else []
        cells += [f"{variant.memory[name] / GB:#.3g}" if name in variant.memory else "" for name in memory]
        if rated and comparison.flops:
            cells.append(f"{comparison.flops / row['median'] / rate:.1%}")
        yield f"| {' | '.join(cells)} |"
    if stepping and any(variant.warm_up for variant in comparison.variants):
        yield from _warm_up(comparison)


def _seconds(row: dict[str, Any]) -> str:
    lower, upper = row["quartiles"]
    return f"{row['median']:.4g} ({lower:.4g} to {upper:.4g})"


def _warm_up(comparison: Comparison) -> Iterator[str]:
    times = [
        f"{variant.name} {variant.warm_up['first_steps_seconds'][0]:.3g} s"
        for variant in comparison.variants
        if variant.warm_up.get("first_steps_seconds")
    ]
    if times:
        yield f"\nFirst step, not included above; it compiles whatever earlier variants have not compiled: {', '.join(times)}."


def at_equal_cost(comparison: Comparison) -> Iterator[str]:
    """Yield the fastest variant within the first one's memory, and the smallest one within its time."""
    memory, points = _points(comparison)
    first = comparison.variants[0].name
    if memory is None or first not in points:
        return
    size, time = points[first]
    fast = min((name for name in points if points[name][0] <= size), key=lambda name: points[name][1])
    small = min((name for name in points if points[name][1] <= time), key=lambda name: points[name][0])
    yield (
        f"\nWith no more memory than `{first}` the fastest is `{fast}`, {time / points[fast][1]:.2f}x; "
        f"in no more time the smallest is `{small}`, {points[small][0] / size:.2f} of the memory ({memory})."
    )


def _points(comparison: Comparison) -> tuple[str | None, dict[str, tuple[float, float]]]:
    """Return the name of a peak that all measured variants have, if any, and each variant's peak in GB and median."""
    measured = [variant for variant in comparison.variants if variant.rounds]
    memory = next((name for name in ("reserved", "allocated") if all(name in variant.memory for variant in measured)), None)
    if memory is None:
        return None, {}
    summary = comparison.summary()
    return memory, {variant.name: (variant.memory[memory] / GB, summary[variant.name]["median"]) for variant in measured}


def compiling_table(comparison: Comparison) -> Iterator[str]:
    """Yield a table of the buckets for each variant of ``compile``."""
    walked = [variant for variant in comparison.variants if variant.facts.get("visits")]
    for variant in walked:
        counts = {name: sum(visit["new"][name] for visit in variant.facts["visits"]) for name in ("graphs", "breaks")}
        processor = sum(visit["processor_seconds"] for visit in variant.facts["visits"])
        python = f"; {processor:.3g} s of processor time without the C++ compilers" if counts["graphs"] else ""
        yield f"\n{variant.meaning}: {counts['graphs']} graphs, {counts['breaks']} graph breaks{python}\n"
        yield "| bucket | first step | then | new graphs |"
        yield "|---|---|---|---|"
        for visit in variant.facts["visits"]:
            width, height = visit["bucket"]
            new = visit["new"]["graphs"]
            yield f"| {width}x{height} | {visit['first_seconds']:.3g} s | {visit['then_seconds']:.3g} s | {new} |"


#: Number of operators in a table.
OPERATORS = 12


def operators_table(comparison: Comparison) -> Iterator[str]:
    """Yield the operators that move the most bytes, if counted, or take the most time of a profiled step."""
    counted = {variant.name: variant.facts["operators"] for variant in comparison.variants if variant.facts.get("operators")}
    yield from _by_operator("GB and kernels of the operator", counted, "moved_bytes", "kernels", GB)
    profiled = {
        variant.name: variant.facts["profile"]["operators"]
        for variant in comparison.variants
        if "operators" in variant.facts.get("profile", {})
    }
    yield from _by_operator("milliseconds and calls in one profiled step", profiled, "seconds", "calls", 1e-3)


def _by_operator(title: str, variants: Mapping[str, Any], quantity: str, number: str, unit: float) -> Iterator[str]:
    if not variants:
        return
    yield f"\n| {title} | {' | '.join(variants)} |"
    yield f"|---|{'---|' * len(variants)}"
    totals = Counter({name: row[quantity] for operators in variants.values() for name, row in operators.items()})
    first = next(iter(variants.values()))
    names = [*first, *(name for name, _ in totals.most_common() if name not in first)]
    for name in names[:OPERATORS]:
        rows = [operators.get(name) for operators in variants.values()]
        cells = ("" if row is None else f"{row[quantity] / unit:.1f}, {row[number]}" for row in rows)
        yield f"| `{name}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
