"""``python -m benchmarks.run SUITE``: measure, and write the JSON that ``benchmarks.report`` reads."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.families import FAMILIES
from benchmarks.plan import Plan
from benchmarks.processes import Bench, WorkerError, ask_once
from benchmarks.ratios import Ratio
from benchmarks.results import FOLDER, Result, begin
from kohya_ext.config.settings import count
from kohya_ext.console import error, note
from kohya_ext.errors import UserError
from kohya_ext.sdscripts.checkouts import find

#: Suite -> rounds and samples a round.
SUITES: Mapping[str, tuple[int, int]] = {
    "step": (5, 8),
    "compile": (1, 1),
    "overhead": (5, 8),
    "patches": (16, 1),
    "work": (1, 1),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one suite; return the exit code: 0, 1 when a variant failed, 2 for a mistake on the command line."""
    given = parse(sys.argv[1:] if argv is None else argv)
    try:
        return _measure(given)
    except UserError as problem:
        error(str(problem))
        return UserError.exit_code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; ``more`` holds the words after ``--``. Exits like argparse for a mistake."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:end])
    given.more = tuple(words[end + 1 :])
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        usage="python -m benchmarks.run SUITE [options] [-- further arguments of the script, for every variant]",
        description=__doc__,
        allow_abbrev=False,  # without_paths knows options by their full names
    )
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="where to run (default: the GPU, if there is one)")
    parser.add_argument("--family", choices=FAMILIES, default="sdxl-lora")
    parser.add_argument("--variants", metavar="NAME,...", default="", help="variants to measure; the first is the baseline")
    parser.add_argument("--rounds", type=_count, metavar="N", help="turns of each variant")
    parser.add_argument("--steps", type=_count, metavar="N", help="samples in a turn")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no round after this time")
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS", help="compile: stop a bucket that takes longer"
    )
    parser.add_argument("--full-depth", action="store_true", help="compile on a CPU: all 19 + 38 FLUX blocks instead of 6 + 12")
    parser.add_argument(
        "--sd-scripts", type=Path, metavar="FOLDER", help="the sd-scripts checkout (default: as kohya_ext finds it)"
    )
    parser.add_argument("--scratch", type=Path, metavar="FOLDER", help="folder for models and logs, which is kept and reused")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON (benchmarks/results/SUITE-FAMILY-DEVICE.json)")
    parser.add_argument(
        "--note", default="", help="remark for the readers of the result, for example that the machine was shared"
    )
    return parser


def _count(text: str) -> int:
    try:
        return count(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _measure(given: argparse.Namespace) -> int:
    rounds, steps = SUITES[given.suite]
    checkout = find(given.sd_scripts)
    if checkout is None:
        raise UserError("no sd-scripts found; name its folder with --sd-scripts, or run `python -m kohya_ext setup`")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as temporary:
        scratch = (given.scratch or Path(temporary)).resolve()
        bench = Bench(checkout, given.device or "cuda", reduced=False, scratch=scratch)
        about = _device(bench)
        if given.device == "cuda" and about["device"] != "cuda":
            raise UserError("--device cuda: PyTorch finds no GPU")
        bench = replace(bench, device=about["device"], reduced=about["device"] == "cpu")
        result = begin(given.suite, checkout, about, bench.reduced, given.note)
        output = given.output or FOLDER / f"{given.suite}-{given.family}-{about['device']}.json"
        plan = Plan(
            bench=bench,
            family_name=given.family,
            variants=tuple(filter(None, given.variants.split(","))),
            more=given.more,
            rounds=given.rounds or rounds,
            steps=given.steps or steps,
            deadline=start + 60 * given.minutes,
            patience=given.patience,
            full_depth=given.full_depth,
            save=lambda: result.write(output),
        )
        measure: Callable[[Plan, Result], None] = importlib.import_module(f"benchmarks.suites.{given.suite}").measure
        measure(plan, result)
        result.write(output)
    note(f"{output}")
    return _print(result)


def _device(bench: Bench) -> dict[str, Any]:
    try:
        return ask_once(bench, "device", {"work": "device"})
    except WorkerError as problem:
        raise UserError(f"PyTorch cannot be used here: {problem}") from None


def _print(result: Result) -> int:
    """Print each comparison in a few lines."""
    failed = False
    for comparison in result.comparisons:
        summary = comparison.summary()
        print(f"\n{comparison.title}, {comparison.unit}")
        for variant in comparison.variants:
            row = summary.get(variant.name)
            text = f"{variant.status}: {variant.reason}" if row is None else f"{row['median']:.4g}"
            if row is not None and "ratio" in row:
                text += f"  {Ratio(**row['ratio'])}"
            print(f"  {variant.name:22} {text}   {variant.meaning}")
            failed = failed or variant.status == "failed"
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
