"""Compare the predicted seconds of a step with published ones and with those measured on an H100, and fit the constants.

    python -m benchmarks.step_seconds [--count [REGEX]] [--fit]

``--count`` counts the kernels of each row of both files whose command line matches, 20 seconds each, and writes
them to results/step_seconds.json, which the other passes read. The table compares each figure with a prediction whose
constants are fitted without its source. ``--fit`` also prints the constants fitted on all of them.

held_out_seconds.tsv has figures that no fit uses, and that were chosen before any of them was predicted. They are compared
with the constants that kohya_ext has.

Figures are facts from public pages, named in the first column of the files. ``assumed`` is what a page leaves open.
Hosts differ, so Google Colab has a factor of the host's seconds, and trainers built on diffusers have one, both fitted on other
figures of theirs. Windows has the factor that the extension assumes, and the H100's machine that of its measured launch.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import results
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import flags
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import gpus, memory_config
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.machine import REFERENCE_LAUNCH
from kohya_ext.estimate.seconds import CONSTANTS, Constants, Prediction, Work
from kohya_ext.estimate.seconds import predict as seconds_of
from kohya_ext.patching.patch import registry
from kohya_ext.sdscripts import checkouts

FIGURES = Path(__file__).parent / "published_seconds.tsv"
HELD_OUT = Path(__file__).parent / "held_out_seconds.tsv"
OUTPUT = results.FOLDER / "step_seconds.json"
HOST_TIME = results.FOLDER / "host_time.json"

#: The generation of sd-scripts whose kernels are counted.
LAYOUT = "v0.11"

#: The sources of rows measured by gpu_time.py, files in results/: an H100, and an H200 in a machine of the same kind.
OURS = ("gpu_time.json", "gpu_time_h200.json")

#: Constant -> its value before the figures, and the standard deviation of its logarithm. The values are round ones of kernels
#: in general, chosen when an earlier fit was known. Constants that are not listed are not fitted.
PRIOR = {
    "product": (0.65, 0.15),
    "geforce": (1.0, 0.15),
    "recent": (1.0, 0.2),
    "convolution": (0.4, 0.3),
    "attention": (0.4, 0.2),
    "geforce_attention": (1.5, 0.3),
    "turing_attention": (0.7, 0.4),
    "masked_attention": (0.3, 0.5),
    "hopper_masked_attention": (0.5, 0.3),
    "bandwidth": (0.85, 0.08),
    "cached": (2.0, 0.3),
    "kernel": (3e-6, 0.3),
    "product_kernel": (4e-6, 0.3),
    "attention_kernel": (10e-6, 0.3),
    "gap": (1.5e-6, 0.3),
    "launch": (20e-6, 0.4),
    "optimizer_launch": (10e-6, 0.5),
    "wait": (15e-6, 0.5),
    "windows_wait": (150e-6, 0.7),
    "replay": (10e-3, 0.5),
}

#: What a launch depends on -> its seconds relative to a common one, where they are not fitted. That of our own measurements is
#: the measured launch of the H100's machine (results/gpu_rates.json), as `calibrate` would use it.
KNOWN = {
    "sd-scripts": 1.0,
    gpus.LINUX: 1.0,
    gpus.WINDOWS: gpus.HOSTS[gpus.WINDOWS],
    **dict.fromkeys(OURS, 27.18 / REFERENCE_LAUNCH),
}

#: The standard deviation for a trainer's or a kind of computer's factor, around 1, and for a figure around its prediction.
HOST_PRIOR, FIGURE_ERROR, BUSY_ERROR = 0.5, 0.2, 0.07


@dataclass(frozen=True)
class Figure:
    """A published time of a step."""

    source: str
    trainer: str
    arguments: str
    """The script's name and its arguments."""
    gpu: Gpu
    seconds: float
    assumed: str
    """What the page leaves open."""
    comment: str
    work: Work
    micro_batches: int
    busy: float | None = None
    """Seconds in which the GPU was busy, where that was measured."""

    @property
    def name(self) -> str:
        """The GPU, the comment and the script."""
        return f"{self.gpu.name}: {self.comment} ({self.arguments.partition(' ')[0]})"

    @property
    def launch(self) -> tuple[str, str]:
        """The trainer and the kind of computer, whose factors the figure shares."""
        if self.source in OURS:
            return "sd-scripts", self.source
        # The other trainers are built on diffusers and PEFT.
        return self.trainer if self.trainer == "sd-scripts" else "diffusers", self.host

    @property
    def host(self) -> str:
        """The kind of the page's computer."""
        first = re.split(r"\W", self.comment.lower(), maxsplit=1)[0]
        return first if first in gpus.HOSTS else gpus.LINUX

    @property
    def graphs(self) -> bool:
        """Whether the step was replayed from CUDA graphs."""
        return flags("cuda_graphs")[0] in self.arguments


def count(only: str) -> None:
    """Count the kernels of the figures whose command line matches a regular expression, and write the output file."""
    rows: dict[str, Any] = json.loads(OUTPUT.read_text(encoding="utf-8"))
    checkout = next(checkout for checkout in checkouts.registered() if checkout.layout == LAYOUT)
    every = (f"{row['script']} {row['arguments']}" for path in (FIGURES, HELD_OUT) for row in _read(path))
    for words in dict.fromkeys(words for words in every if re.search(only, words)):
        command = _command(checkout, words)
        estimate = estimation.estimate(checkout, command, timed=True)
        micro = memory_config.read(command)[0].gradient_accumulation_steps
        rows[words] = {"work": estimate.work, "micro_batches": micro}
        text = json.dumps(rows, separators=(",", ":")).replace('},"', '},\n"')
        OUTPUT.write_text(f"{text}\n", encoding="utf-8")


def _command(checkout: checkouts.Checkout, words: str) -> CommandLine:
    """Return a row's command line. ``--disable_patch !NAME`` disables every patch but one.

    That one removes what upstream did not do yet, or what another trainer does not do.
    """
    script, *arguments = shlex.split(words)
    kept = [word for word in arguments if word.startswith("!")]
    disabled = [name for name in registry() if f"!{name}" not in kept]
    argv = [word for word in arguments if word not in kept]
    if kept:
        argv.remove("--disable_patch")
        argv += [word for name in disabled for word in ("--disable_patch", name)]
    return CommandLine(checkout.script(script), argv, {})


def _read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of figures."""
    with path.open(encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]


def figures(path: Path = FIGURES) -> list[Figure]:
    """Return every figure of a file with its counted kernels."""
    counted = json.loads(OUTPUT.read_text(encoding="utf-8"))
    ours = {name: json.loads((results.FOLDER / name).read_text(encoding="utf-8"))["rows"] for name in OURS}
    known = []
    for row in _read(path):
        words = f"{row['script']} {row['arguments']}"
        of_words = counted[words]
        of_source = ours.get(row["source"])
        busy = of_source[row["comment"]][0]["profile"]["busy_seconds"] if of_source is not None else None
        known.append(
            Figure(
                row["source"],
                row["trainer"],
                words,
                gpus.named(row["card"]),
                float(row["seconds"]),
                row["assumed"],
                row["comment"],
                Work.from_row(of_words["work"]),
                of_words["micro_batches"],
                busy,
            )
        )
    return known


@dataclass(frozen=True)
class Fit:
    """Constants, and the factors of a launch by trainer and kind of computer."""

    constants: Constants
    factors: Mapping[str, float]

    def predict(self, figure: Figure) -> Prediction:
        """Return the prediction for a figure."""
        launch = math.prod(self.factors.get(part, KNOWN.get(part, 1.0)) for part in figure.launch)
        gpu = replace(figure.gpu, host=figure.host, launch=launch)
        return seconds_of(figure.work, gpu, figure.micro_batches, figure.graphs, self.constants)

    def busy(self, figure: Figure) -> float:
        """Return the predicted seconds in which the GPU is busy."""
        constants = replace(self.constants, gap=0.0)
        parts = seconds_of(figure.work, figure.gpu, figure.micro_batches, figure.graphs, constants).parts
        return parts["arithmetic"] + parts["memory"]


def fit(given: Sequence[Figure], steps: int = 800) -> Fit:
    """Return the constants with the smallest error on some figures and smallest distance from their prior, by random search."""
    parts = sorted({part for figure in given for part in figure.launch} - KNOWN.keys())
    start = {**{name: value for name, (value, _) in PRIOR.items()}, **dict.fromkeys(parts, 1.0)}
    sizes = {**{name: size for name, (_, size) in PRIOR.items()}, **dict.fromkeys(parts, HOST_PRIOR)}

    def built(values: Mapping[str, float]) -> Fit:
        return Fit(replace(CONSTANTS, **{name: values[name] for name in PRIOR}), {name: values[name] for name in parts})

    def cost(values: Mapping[str, float]) -> float:
        tried = built(values)
        far = sum((math.log(values[name] / start[name]) / sizes[name]) ** 2 for name in values)
        errors = sum(_loss(math.log(tried.predict(figure).seconds / figure.seconds) / FIGURE_ERROR) for figure in given)
        busy = [figure for figure in given if figure.busy is not None]
        return far + errors + sum(_loss(math.log(tried.busy(figure) / (figure.busy or 1)) / BUSY_ERROR) for figure in busy)

    generator = random.Random(0)
    best, lowest = start, cost(start)
    for step in range(steps):
        width = 0.3 if step % 2 else 0.08
        names = generator.sample([*best], 2)
        tried = {
            name: value * math.exp(generator.gauss(0, width * sizes[name])) if name in names else value
            for name, value in best.items()
        }
        if (error := cost(tried)) < lowest:
            best, lowest = tried, error
    return built(best)


def _loss(error: float) -> float:
    """Return a loss that grows as the square at first, then linearly: some figures are far off for unknown reasons."""
    return error**2 if abs(error) < 1.5 else 3 * abs(error) - 2.25


def cross_validate(given: Sequence[Figure]) -> Iterator[tuple[Figure, Prediction]]:
    """Yield each figure with its prediction from a fit without its page, and without others of that repository."""
    for site in dict.fromkeys(_site(figure) for figure in given):
        fitted = fit([figure for figure in given if _site(figure) != site])
        yield from ((figure, fitted.predict(figure)) for figure in given if _site(figure) == site)


def _site(figure: Figure) -> str:
    return figure.source.partition(" ")[0]


def leave_one_out(given: Sequence[Figure]) -> Iterator[tuple[Figure, Prediction]]:
    """Yield each figure with its prediction from a fit without its model and trainer: the factors stay known."""
    for key in dict.fromkeys(_model(figure) for figure in given):
        fitted = fit([figure for figure in given if _model(figure) != key])
        yield from ((figure, fitted.predict(figure)) for figure in given if _model(figure) == key)


def _model(figure: Figure) -> tuple[str, str]:
    """Return what two variants share: the source, and the script with its preset."""
    return figure.source, " ".join(figure.arguments.split()[:3])


def engine_launches() -> list[float]:
    """Return what a launch of autograd's engine costs the virtual GPU's host, relative to one of a recomputation.

    One ratio for each family and variant. With checkpointing a step launches the forward's kernels once more.
    """
    rows = json.loads(HOST_TIME.read_text(encoding="utf-8"))["rows"]
    ratios = []
    for name, without in rows.items():
        recomputing = rows.get(name.replace("--no-gradient", "--gradient"), without)
        for variant in ("upstream", "default", "fused"):
            once, twice = without.get(variant, {}), recomputing.get(variant, {})
            if "seconds" in once and "seconds" in twice and twice["launches"] > once["launches"]:
                forward = twice["launches"] - once["launches"]
                each = (twice["seconds"] - once["seconds"]) / forward
                ratios.append((once["seconds"] - forward * each) / (once["launches"] - forward) / each)
    return ratios


def report(title: str, predicted: Sequence[tuple[Figure, Prediction]], each: bool = False) -> None:
    """Print the errors of some predictions, how many are in the range, and how often the order of two variants is right."""
    ratios = [prediction.seconds / figure.seconds for figure, prediction in predicted]
    right = [
        (first[1].seconds - second[1].seconds) * (first[0].seconds - second[0].seconds) > 0
        for first, second in combinations(predicted, 2)
        if (first[0].gpu, *_model(first[0])) == (second[0].gpu, *_model(second[0]))
        and abs(math.log(first[0].seconds / second[0].seconds)) > 0.03
    ]
    for (figure, prediction), ratio in zip(predicted, ratios, strict=True):
        if each:
            print(f"  {figure.seconds:7.3f} s  {prediction.seconds:7.3f} s  {ratio - 1:+5.0%}  {figure.name}")
    errors = [abs(ratio - 1) for ratio in ratios]
    inside = sum(
        1 / prediction.factor <= ratio <= prediction.factor for (_, prediction), ratio in zip(predicted, ratios, strict=True)
    )
    order = f"; order of two variants right {sum(right)} of {len(right)}" if right else ""
    print(
        f"{title}: {len(errors)} figures, median error {median(errors):.1%}, nine in ten within "
        f"{quantiles(errors, n=10)[-1]:.0%}, {inside} inside their range{order}"
    )


def main() -> int:
    """Run the passes that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", nargs="?", const="", metavar="REGEX", help="count the kernels of the matching figures first")
    parser.add_argument("--fit", action="store_true", help="print the constants fitted on all figures")
    given = parser.parse_args()
    if given.count is not None:
        count(given.count)
    rows = figures()
    without_source = [*cross_validate(rows)]
    report("without its source", without_source, each=True)
    published = [pair for pair in without_source if pair[0].source not in OURS]
    report("of these, published by others", published)
    report("of these, with a known resolution", [pair for pair in published if "resolution" not in pair[0].assumed])
    report("of the published, sd-scripts", [pair for pair in published if pair[0].trainer == "sd-scripts"])
    report("without its model, the host known", [*leave_one_out(rows)])
    ratios = engine_launches()
    print(f"launch of autograd's engine on the virtual GPU: {median(ratios):.2f} of a recomputation's, {len(ratios)} pairs")
    shipped = Fit(CONSTANTS, gpus.HOSTS)
    held_out = figures(HELD_OUT)
    report("held out", [(figure, shipped.predict(figure)) for figure in held_out], each=True)
    for figure in (*rows, *held_out):
        if figure.busy is not None:
            busy = shipped.busy(figure)
            print(f"  {figure.busy:7.3f} s  {busy:7.3f} s  {busy / figure.busy - 1:+5.0%}  GPU busy: {figure.name}")
    if given.fit:
        fitted = fit(rows, steps=3000)
        print({name: float(f"{value:.3g}") for name, value in asdict(fitted.constants).items()}, dict(fitted.factors))
        report("fitted on all", [(figure, fitted.predict(figure)) for figure in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
