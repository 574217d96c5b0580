"""The predicted seconds of a command line's step, and their description. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import gpus, machine
from kohya_ext.estimate import seconds as model
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.result import Estimate
from kohya_ext.estimate.seconds import Constants, Prediction, Work

#: What limits a step -> its words.
LIMITS = {
    "host": "the host, which launches kernels more slowly than the GPU runs them",
    "arithmetic": "arithmetic: matrix products, convolutions and attention",
    "memory": "the GPU's memory bandwidth",
    "bus": "copies of swapped blocks over the bus",
}

#: Kind of computer -> its words.
_PLACES = {gpus.LINUX: "", gpus.WINDOWS: " under Windows", gpus.COLAB: " on Google Colab"}


def predict(estimate: Estimate, command: CommandLine, gpu: Gpu) -> Prediction | None:
    """Return the predicted time of an optimizer step of a command line on a GPU.

    None if its kernels were not counted, or if the GPU has none for its 8-bit base.
    It is multiplied by how much longer this machine's runs took on that GPU than predicted, if any were measured.
    """
    predicted = by_rates(estimate, command, gpu)
    return None if predicted is None else replace(predicted, seconds=predicted.seconds * machine.correction(gpu.name))


def by_rates(estimate: Estimate, command: CommandLine, gpu: Gpu, constants: Constants = model.CONSTANTS) -> Prediction | None:
    """Return the same without the correction by runs."""
    if estimate.work is None:
        return None
    if gpu.reason_without_kernels(command.settings["base_precision"]) is not None:
        return None
    micro_batches = int(command.values.get("gradient_accumulation_steps") or 1)
    graphs = estimate.recorded_kernels > 0 and command.settings["vram_budget"] is None
    return model.predict(Work.from_row(estimate.work), gpu, micro_batches, graphs, constants)


def slowness(estimates: Sequence[Estimate], gpu: Gpu) -> list[float]:
    """Return how long an image takes in each of some runs, in a unit that they share: seconds on a GPU.

    If the kernels of one are not known, the unit is floating-point operations, without the time to copy swapped blocks.
    """
    if not all_counted(estimates):
        return [estimate.flops_per_image for estimate in estimates]
    return [seconds_per_image(estimate, gpu) for estimate in estimates]


def seconds_per_image(estimate: Estimate, gpu: Gpu) -> float:
    """Return the predicted seconds of an image by the GPU's rates. The kernels must have been counted."""
    assert estimate.work is not None, "called with counted kernels"
    micro_batches = int(estimate.config.get("gradient_accumulation_steps", 1))
    return model.predict(Work.from_row(estimate.work), gpu, micro_batches).seconds / estimate.images


def all_counted(estimates: Sequence[Estimate]) -> bool:
    """Return whether the kernels of all estimates were counted."""
    return all(estimate.work is not None for estimate in estimates)


def lines(time: Prediction, gpu: Gpu) -> list[str]:
    """Return the prediction for the console: seconds with their range, what limits the step, and the source of the rates."""
    low, high = time.seconds / time.factor, time.seconds * time.factor
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in time.parts.items() if seconds >= 0.005)
    where = f"on the {gpu.name}{_PLACES[gpu.host]}"
    return [
        f"{format_seconds(time.seconds)} per step {where} ({format_seconds(low)} to {format_seconds(high)}), limited "
        f"by {LIMITS[time.limit]}. Seconds of each alone: {parts}. {_source(gpu)}"
    ]


def _source(gpu: Gpu) -> str:
    if gpu.measured:
        return "The GPU's rates were measured by `calibrate`."
    return (
        "Nine in ten published figures of sd-scripts are inside such a range; `python -m kohya_ext calibrate` measures "
        "your machine and narrows it."
    )


def format_seconds(seconds: float) -> str:
    """Return seconds with two significant digits: ``0.48 s``, ``12 s``."""
    digits = max(1 - math.floor(math.log10(seconds)), 0) if seconds > 0 else 0
    return f"{seconds:.{digits}f} s"


def as_json(time: Prediction) -> dict[str, Any]:
    """Return the prediction as JSON."""
    return {
        "seconds": time.seconds,
        "from": time.seconds / time.factor,
        "to": time.seconds * time.factor,
        "limit": time.limit,
        "parts": dict(time.parts),
    }
