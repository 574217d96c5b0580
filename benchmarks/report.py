"""``python -m benchmarks.report``: tables (Markdown) and pictures (PNG) of the JSON in results/."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cards, goals
from benchmarks.results import FOLDER, Comparison, Result, Variant, kept, read
from kohya_ext.console import error, note
from kohya_ext.units import GB

REPORT = "README.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results (all in benchmarks/results)")
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="FOLDER", help=f"for {REPORT} and the pictures")
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
    cards.draw(given.output / cards.PICTURE)
    text = "\n".join(_document(results, given.output))
    (given.output / REPORT).write_text(text, encoding="utf-8")
    note(str(given.output / REPORT))
    return 0


def _document(results: Sequence[tuple[Path, Result]], folder: Path) -> Iterator[str]:
    yield "# Measured\n"
    yield "Made by `python -m benchmarks.report` of the JSON files beside it; each table names the command that makes its file"
    yield "again. Times are medians, with the quartiles in brackets. A ratio is the first row's median over the row's, above 1"
    yield "is faster; in brackets the lowest and the highest of the rounds. GB is 1e9 bytes."
    yield "\n## What fits which card\n"
    yield "The shipped presets by the estimates that come with the package (`python -m kohya_ext presets list`).\n"
    yield f"![What fits which card]({cards.PICTURE})"
    yield "\n## What is to be reached\n"
    yield from goals.table()
    for file, result in results:
        yield f"\n## {file.stem}\n"
        yield from _about(result)
        for index, comparison in enumerate(result.comparisons):
            yield f"\n### {comparison.title}\n"
            yield from table(comparison, result)
            yield from at_equal_cost(comparison)
            yield from compiling_table(comparison)
            yield from operators_table(comparison)
            picture = folder / f"{file.stem}-{index}.png"
            if draw(comparison, picture):
                yield f"\n![{comparison.title}]({picture.name})"
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
        yield "**Tiny models on a CPU:** it shows that the suite works and what Python costs, not what a GPU would gain."
    if result.note:
        yield f"Note: {result.note}."
    if not result.complete:
        yield "**Incomplete:** the time was up before all rounds were done, or a part failed."


#: Peaks, and how a table calls them.
MEMORY = {"allocated": "allocated GB", "reserved": "reserved GB", "host_resident": "process GB"}


def table(comparison: Comparison, result: Result) -> Iterator[str]:
    """Yield a comparison as a Markdown table."""
    rate = result.machine.get("matmul", {}).get("flops_per_second")
    said = {name for variant in comparison.variants for name in variant.memory}
    memory = [name for name in MEMORY if name in said and (name != "host_resident" or "allocated" not in said)]
    batch = comparison.configuration.get("batch")
    stepping = comparison.unit == "seconds a step" and batch is not None
    titles = ["variant", comparison.unit, "ratio"]
    titles += ["pictures a second"] if stepping else []
    titles += [MEMORY[name] for name in memory]
    rated = bool(comparison.flops and rate and "reserved" in said)
    titles += ["share of the device's own bf16 matmul rate, recomputing not counted"] if rated else []
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    summary = comparison.summary()
    for variant in comparison.variants:
        row = summary.get(variant.name)
        if row is None:
            yield f"| {variant.meaning} | {variant.status}: {variant.reason} |{' |' * (len(titles) - 2)}"
            continue
        cells = [variant.meaning, _seconds(row), _ratio(row)]
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


def _ratio(row: dict[str, Any]) -> str:
    return "{of_medians:.2f}x ({lowest:.2f} to {highest:.2f})".format(**row["ratio"]) if "ratio" in row else ""


def _warm_up(comparison: Comparison) -> Iterator[str]:
    said = [
        f"{variant.name} {variant.warm_up['first_steps_seconds'][0]:.3g} s"
        for variant in comparison.variants
        if variant.warm_up.get("first_steps_seconds")
    ]
    if said:
        yield f"\nFirst step, in none of the figures above; it compiles what no earlier variant has: {', '.join(said)}."


def at_equal_cost(comparison: Comparison) -> Iterator[str]:
    """Yield the fastest variant that needs no more memory than the first, and the smallest that is not slower."""
    memory, points = _points(comparison)
    first = comparison.variants[0].name
    if memory is None or first not in points or not comparison.is_against_first:
        return
    size, time = points[first]
    fast = min((name for name in points if points[name][0] <= size), key=lambda name: points[name][1])
    small = min((name for name in points if points[name][1] <= time), key=lambda name: points[name][0])
    yield (
        f"\nWith no more memory than `{first}` the fastest is `{fast}`, {time / points[fast][1]:.2f}x; "
        f"in no more time the smallest is `{small}`, {points[small][0] / size:.2f} of the memory ({memory})."
    )


def _points(comparison: Comparison) -> tuple[str | None, dict[str, tuple[float, float]]]:
    """Return which peak all measured variants have, if one, and of each variant the peak in GB and the median."""
    measured = [variant for variant in comparison.variants if variant.rounds]
    memory = next((name for name in ("reserved", "allocated") if all(name in variant.memory for variant in measured)), None)
    if memory is None:
        return None, {}
    summary = comparison.summary()
    return memory, {variant.name: (variant.memory[memory] / GB, summary[variant.name]["median"]) for variant in measured}


def compiling_table(comparison: Comparison) -> Iterator[str]:
    """Yield what each bucket cost, for the suite that walks through them."""
    walked = [variant for variant in comparison.variants if variant.facts.get("visits")]
    for variant in walked:
        counts = {name: sum(visit["new"][name] for visit in variant.facts["visits"]) for name in ("graphs", "breaks")}
        processor = sum(visit["processor_seconds"] for visit in variant.facts["visits"])
        python = f"; {processor:.3g} s of processor time without the compilers that it starts" if counts["graphs"] else ""
        yield f"\n{variant.meaning}: {counts['graphs']} graphs, {counts['breaks']} graph breaks{python}\n"
        yield "| bucket | first step | then | new graphs |"
        yield "|---|---|---|---|"
        for visit in variant.facts["visits"]:
            width, height = visit["bucket"]
            new = visit["new"]["graphs"]
            yield f"| {width}x{height} | {visit['first_seconds']:.3g} s | {visit['then_seconds']:.3g} s | {new} |"


#: Operators that are named; the others take little.
OPERATORS = 12


def operators_table(comparison: Comparison) -> Iterator[str]:
    """Yield which operators move the most bytes, for the suite that counts them, or take the most time of a profiled step."""
    counted = {variant.name: variant.facts["operators"] for variant in comparison.variants if variant.facts.get("operators")}
    yield from _by_operator("GB and kernels of the operator", counted, "moved_bytes", "kernels", GB)
    profiled = {
        variant.name: variant.facts["profile"]["operators"]
        for variant in comparison.variants
        if "operators" in variant.facts.get("profile", {})
    }
    yield from _by_operator("milliseconds and calls in one profiled step", profiled, "seconds", "calls", 1e-3)


def _by_operator(title: str, found: Mapping[str, Any], quantity: str, number: str, one: float) -> Iterator[str]:
    if not found:
        return
    yield f"\n| {title} | {' | '.join(found)} |"
    yield f"|---|{'---|' * len(found)}"
    totals = Counter({name: row[quantity] for operators in found.values() for name, row in operators.items()})
    first = next(iter(found.values()))
    names = [*first, *(name for name, _ in totals.most_common() if name not in first)]
    for name in names[:OPERATORS]:
        rows = [operators.get(name) for operators in found.values()]
        yield f"| `{name}` | {' | '.join('' if row is None else f'{row[quantity] / one:.1f}, {row[number]}' for row in rows)} |"


# --- pictures --------------------------------------------------------------------------------------------------------


def draw(comparison: Comparison, file: Path) -> bool:
    """Draw a comparison: time against memory where a GPU's is known, bars of ratios otherwise. False: nothing to draw."""
    measured = [variant for variant in comparison.variants if variant.rounds]
    if len(measured) < 2:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    memory, points = _points(comparison)
    figure, axes = pyplot.subplots(figsize=(8, 5 if memory else 0.5 * len(measured) + 2), layout="constrained")
    if memory is not None:
        _trade_off(axes, comparison, points, memory)
    else:
        _bars(axes, comparison, measured)
    axes.set_title(comparison.title)
    # No date and no version inside: the same figures give the same file.
    figure.savefig(file, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return True


def _trade_off(axes: Any, comparison: Comparison, points: Mapping[str, tuple[float, float]], memory: str) -> None:
    """Lower is faster, further left is smaller; the line joins what nothing else beats in both (the Pareto front)."""
    best = [point for point in points.values() if not any(_beats(other, point) for other in points.values())]
    axes.plot(*zip(*sorted(best), strict=True), color="tab:green", alpha=0.4, linewidth=4, zorder=0)
    for name, point in points.items():
        axes.plot(*point, "o", color="black" if name == comparison.variants[0].name else "tab:blue")
        axes.annotate(name, point, textcoords="offset points", xytext=(5, 5), fontsize=8)
    widest = 1.25 * max(x for x, _ in points.values())
    for card in (8, 12, 16, 24, 32, 48):
        if (x := card * 2**30 / GB) < widest:
            axes.axvline(x, color="tab:red", alpha=0.3, linewidth=1)
            axes.annotate(f"{card} GB card", (x, 0), fontsize=7, color="tab:red", ha="right", va="bottom")
    axes.set_xlabel(f"{memory} at most, GB (1e9 bytes)")
    axes.set_ylabel(comparison.unit)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, widest)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _bars(axes: Any, comparison: Comparison, variants: Sequence[Variant]) -> None:
    summary = comparison.summary()
    medians = [summary[variant.name]["median"] for variant in variants]
    spread = [summary[variant.name]["quartiles"] for variant in variants]
    reach = [
        [max(median - lower, 0.0) for median, (lower, _) in zip(medians, spread, strict=True)],
        [max(upper - median, 0.0) for median, (_, upper) in zip(medians, spread, strict=True)],
    ]
    colours = ["tab:gray" if variant is comparison.variants[0] else "tab:blue" for variant in variants]
    axes.barh([variant.name for variant in variants], medians, xerr=reach, color=colours)
    axes.invert_yaxis()
    axes.set_xlabel(f"{comparison.unit} (bars: median; lines: quartiles)")


if __name__ == "__main__":
    sys.exit(main())
