"""Find the fastest settings that fit a GPU, and their command line."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from rich.table import Table

from kohya_ext import installed_gpus, units
from kohya_ext.commands.estimate import ACCURACY, warn_of_model
from kohya_ext.config import training_command
from kohya_ext.config.command_line import CommandLine, quoted
from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, gpus, machine, step_time, tuned
from kohya_ext.output import Console
from kohya_ext.planning import automatic, chosen_speed
from kohya_ext.planning.plan import Candidate, Plan, plan
from kohya_ext.planning.tiers import usable_bytes
from kohya_ext.reporting import several_gpus
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import gigabytes

_HALF = "precision: fp16, because the GPU has no bf16. The preset chooses it on that GPU."

_COMPILED = "The estimates exclude compiling, which lowers memory use; `estimate` includes it."

_EXPERIMENTAL = "Faster, but experimental: with an 8-bit base, which no GeForce GPU has run yet (docs/speed.md, 8-bit base):"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments that must not change", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, sizes in bytes")
    parser.add_argument(
        "--verbose",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the other configurations, too, and the memory savings behind the answer",
    )
    parser.add_argument(
        "--vram",
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help='the advertised size of the GPU, default: of this machine; 16, 16gb and "16 GB" are the same; '
        "15.5GiB and a number of bytes are exact",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help='the GPU to plan for, by name: "RTX 4070"; it also gives the size if --vram does not',
    )
    machine.add_gpu_host(parser)
    parser.add_argument(
        "--gpus",
        metavar="NxSIZE",
        default=argparse.SUPPRESS,
        help='several GPUs of one machine to plan for, by size or name: 2x24GB, "2x RTX 4090"',
    )
    parser.add_argument(
        "--host_memory",
        "--host-memory",
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help="host memory of the machine with --gpus, such as 64GB; default: of this machine, if it has as many GPUs",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    request = training_command.read(arguments, automatic, "nothing to plan", _add_own)
    own = request.own
    # A preset from the environment would be missing in the printed command line.
    environ = {name: value for name, value in os.environ.items() if name != "KOHYA_EXT_PRESET"}
    command = replace(request.command, environ=environ)
    warn_of_model(command)
    if "gpus" in own:
        several_gpus.print_plan(request.checkout, command, own)
        return 0
    settings = command.with_tier(None).with_({"vram": own["vram"]} if "vram" in own else {}).settings
    given = machine.chosen(own)
    size = settings.vram or (given.memory if given is not None else None)
    here = installed_gpus.first_gpu()
    name, card = given.name if given is not None else "", size
    if card is None and here is not None:
        name, card = here.name, here.memory
    if card is None:
        raise UserError('no NVIDIA GPU found; give one to plan for, for example --gpu "RTX 4070" or --vram 16')
    gpu = given or machine.gpu() or gpus.typical(card)
    if given is not None:
        command = replace(command, has_bf16=given.has_bf16)
    result = plan(request.checkout, command, card, gpu, note)
    words = _words(result.answer.command)
    if own.get("json"):
        print(json.dumps(_as_json(result, words), indent=1))
    else:
        _show(Console(), result, name, _chosen(request.checkout, result), verbose="verbose" in own)
    return 0


def _show(console: Console, result: Plan, name: str, chosen: Sequence[str], verbose: bool) -> None:
    answer, command = result.answer, result.answer.command
    card = f"the {units.label(result.card)}{name and f', {name}'}"
    total, usable = answer.estimate.total, usable_bytes(result.card)
    for line in (
        f"{command.name} on {card}: {answer.name}",
        f"time: {_time(result)}",
        *chosen,
        f"memory: {gigabytes(total)} GB of {gigabytes(usable)} GB, with 5 percent of the GPU left free; {ACCURACY}",
        *([f"drawbacks: {answer.traded}"] if answer.traded else []),
        *([_HALF] if command.values.get("mixed_precision") == "fp16" and "mixed_precision" not in command.given else []),
        "To run it:",
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    print(f"  {quoted(_words(command))}")
    if result.experimental is not None:
        console.print(_about_8_bits(result.experimental.command), highlight=False, soft_wrap=True)
        print(f"  {quoted(_words(result.experimental.command))}")
    if verbose:
        _show_others(console, result)
    else:
        console.print("--verbose prints the other configurations, and what each change saves and costs.", highlight=False)


def _show_others(console: Console, result: Plan) -> None:
    experimental = [] if result.experimental is None else [result.experimental]
    shown = [result.answer, *experimental, *result.others, *result.too_big[:2]]
    times = step_time.slowness([candidate.estimate for candidate in shown], result.gpu)
    table = Table("", "memory", "time per image", "drawbacks", title="configurations")
    for heading, candidates in (
        ("answer", [result.answer]),
        ("experimental", experimental),
        ("next best", result.others),
        ("too big", result.too_big[:2]),
    ):
        for candidate in candidates:
            size = f"{gigabytes(candidate.estimate.total)} GB"
            ratio = f"{times[shown.index(candidate)] / times[0]:.2f}x"
            table.add_row(f"{heading}: {candidate.name}", size, ratio, candidate.traded)
    console.print(table)
    tree = Table("", "change", "flags", "cost", title="memory savings, the cheapest first")
    tree.columns[2].overflow = "fold"  # a truncated flag would be useless
    for branch in result.tree:
        tree.add_row(branch.status, branch.saving.name, " ".join(branch.words), branch.costs)
    console.print(tree)
    counted = step_time.all_counted([candidate.estimate for candidate in shown])
    how = f"predicted for the {result.gpu.name}" if counted else "from operations, without copies of swapped blocks"
    for line in (
        f"Time per image: {how}, relative to the answer.",
        "Batch size and accumulation are per process.",
        *([_COMPILED] if result.answer.command.settings["selective_torch_compile"] else []),
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _time(result: Plan) -> str:
    """Return the seconds of the answer."""
    if (measured := result.answer.measured) is not None and not measured.failed:
        seconds, size = step_time.format_seconds(measured.seconds), gigabytes(measured.reserved)
        return f"{seconds} per image, with {size} GB reserved, measured by `tune` on this GPU on {measured.day}"
    time = step_time.predict(result.answer.estimate, result.answer.command, result.gpu)
    reason = result.gpu.reason_without_kernels(result.answer.estimate.config.get("base_precision"))
    if time is None:
        return reason or "not known, because the kernels of this configuration were not counted; see `estimate --gpu`"
    return step_time.lines(time, result.gpu)[0]


def _about_8_bits(command: CommandLine) -> str:
    """Return the line above a command with an 8-bit base."""
    judged = tuned.judgement(command)
    if judged is None:
        return _EXPERIMENTAL
    advice = "is good enough" if judged.is_good else "is not good enough"
    change = f"it changes losses by {judged.loss:.2%}"
    return f"Faster, with an 8-bit base, which {advice} for this checkpoint, as `tune` measured on {judged.day} ({change}):"


def _chosen(checkout: Checkout, result: Plan) -> list[str]:
    command = result.answer.command
    look_up = partial(cache.find, checkout, disabled_patches=command.settings.disable_patch, timed=True)
    return chosen_speed.lines(command, result.gpu, result.card, look_up)


def _words(command: CommandLine) -> list[str]:
    return ["python", "-m", "kohya_ext", command.name, *command.argv]


def _as_json(result: Plan, words: Sequence[str]) -> dict[str, Any]:
    def row(candidate: Candidate) -> dict[str, Any]:
        return {
            "name": candidate.name,
            "arguments": list(candidate.command.argv),
            "total": candidate.estimate.total,
            "reserved": candidate.estimate.reserved,
            "flops_per_image": candidate.estimate.flops_per_image,
            "time": None
            if (time := step_time.predict(candidate.estimate, candidate.command, result.gpu)) is None
            else step_time.as_json(time),
            "traded": candidate.traded,
            "measured": None if candidate.measured is None else asdict(candidate.measured),
        }

    return {
        "card": result.card,
        "gpu": result.gpu.name,
        "usable": usable_bytes(result.card),
        "answer": row(result.answer),
        "experimental": None if result.experimental is None else row(result.experimental),
        "others": [row(candidate) for candidate in result.others],
        "too_big": [row(candidate) for candidate in result.too_big],
        "tree": [
            {"step": branch.saving.name, "status": branch.status, "sets": list(branch.words), "costs": branch.costs,
             "exact": branch.saving.exact}
            for branch in result.tree
        ],
        "command": quoted(words),
        "calibrated_on_cuda": False,
    }  # fmt: skip
