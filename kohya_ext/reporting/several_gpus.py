"""The output of ``plan --gpus``: the fastest settings for several GPUs of one machine, and their command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from kohya_ext import installed_gpus, units
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, quoted
from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, machine, memory_config
from kohya_ext.output import Console
from kohya_ext.planning.several_gpus import Machine, Setup, SeveralPlan, plan
from kohya_ext.planning.tiers import usable_bytes
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import gigabytes


def print_plan(checkout: Checkout, command: CommandLine, own: Mapping[str, Any]) -> None:
    """Print the plan for the GPUs of the option ``gpus``."""
    count, size, gpu = read_gpus(own["gpus"])
    host = units.read_size(own["host_memory"]) if "host_memory" in own else _host_memory(count)
    command = replace(command, has_bf16=gpu.has_bf16)
    result = plan(checkout, command, Machine(count, size, gpu, host), note)
    if own.get("json"):
        print(json.dumps(_as_json(result), indent=1))
    else:
        _show(Console(), result, verbose="verbose" in own)


def read_gpus(text: str) -> tuple[int, int, gpus.Gpu]:
    """Return the number of GPUs, their size in bytes and their rates: ``2x24GB``, ``2x RTX 4090``. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+)\s*[x*]\s*(\S.*)", text, re.IGNORECASE)
    if match is None or int(match[1]) < 2:
        raise UserError(f'--gpus {text!r}: give a number of 2 or more and a size or a name: 2x24GB or "2x RTX 4090"')
    try:
        size = units.read_card(match[2])
    except ValueError:
        gpu = machine.named(match[2].strip())
        return int(match[1]), gpu.memory, gpu
    return int(match[1]), size, gpus.typical(size)


def _host_memory(count: int) -> int | None:
    """Return this machine's memory if it has the GPUs; None if the plan is for another one."""
    if installed_gpus.visible_gpus() < count:
        return None
    import psutil

    return int(psutil.virtual_memory().total)


def words(option: Setup) -> list[str]:
    """Return the command line of an option, ready to paste."""
    command = option.candidate.command.with_({"num_processes": None})
    launcher = ["--num_processes", str(option.machine.gpus)] if option.machine.gpus > 1 else []
    return ["python", "-m", "kohya_ext", *launcher, command.name, *_short(command)]


def _short(command: CommandLine) -> Iterator[str]:
    """Yield the arguments; presets of the script's own family without its name, except the base preset."""
    own = f"{preset_files.FAMILIES.get(command.name)}/"
    for word in command.argv:
        yield word if word.endswith(f"/{preset_files.BASE}") else word.removeprefix(own)


def _range(low: float, high: float) -> str:
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def _show(console: Console, result: SeveralPlan, verbose: bool) -> None:
    where, answer = result.machine, result.answer
    title = f"{answer.candidate.command.name} on {where.gpus} times the {units.label(where.card)}"
    low, high = answer.seconds
    size = gigabytes(answer.candidate.estimate.total)
    for line in (
        f"{title}: {answer.candidate.name}",
        f"time: {answer.seconds_per_image:.2f} s per image, {_range(low, high)} s per step of {_images(answer)}",
        f"memory: {size} GB of {gigabytes(usable_bytes(where.card))} GB on each GPU, with 5 percent left free",
        f"drawbacks: {answer.candidate.traded}",
        *_several_or_one(result),
        *_host(result),
        "To run it:",
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    print(f"  {quoted(words(answer))}")
    if not verbose:
        console.print("--verbose prints the other configurations.", highlight=False)
        return
    table = Table("", "GPU", "host, of all", "batch", "step", "per image", title="configurations")
    headings = [("answer", [answer]), ("next best", result.others), ("too big", result.too_big)]
    for heading, options in headings:
        for option in options:
            low, high = option.seconds
            faster = not option.is_close and option.fits and option.seconds_per_image < answer.seconds_per_image
            table.add_row(
                f"{'faster, but less precise' if faster else heading}: {option.candidate.name}",
                f"{gigabytes(option.candidate.estimate.total)} GB",
                f"{gigabytes(option.host)} GB" if option.host else "",
                _batch(option),
                f"{low:.1f} to {high:.1f} s",
                f"{option.seconds_per_image:.2f} s",
            )
    console.print(table)
    for line in _notes(result):
        console.print(line, highlight=False, soft_wrap=True)


def _batch(option: Setup) -> str:
    config = memory_config.read(option.candidate.command)[0]
    return f"{option.machine.gpus} x {config.train_batch_size} x {config.gradient_accumulation_steps}"


def _images(option: Setup) -> str:
    return f"{option.images} image{'s' * (option.images != 1)}"


def _several_or_one(result: SeveralPlan) -> Iterator[str]:
    """Yield whether the other GPUs pay, if the time on one is known."""
    alone, together, count = result.alone, result.together, result.machine.gpus
    if alone is None:
        return
    times = f"{alone.seconds_per_image:.2f} s per image on one of them, {together.seconds_per_image:.2f} s on {count}"
    if alone is result.answer:
        yield f"One GPU is faster than {count}: {times}, because {count} wait for the exchange of gradients."
        yield f"The fastest on {count} GPUs: {quoted(words(together))}"
    elif alone.seconds_per_image < together.seconds_per_image:
        yield f"One GPU is faster, but stores weights only in bf16: {times}. Its command: {quoted(words(alone))}"
    else:
        yield f"One GPU is slower: {times}."


def _host(result: SeveralPlan) -> Iterator[str]:
    answer, where = result.answer, result.machine
    if answer.images != result.wanted:
        yield (
            f"A step trains {answer.images} images, and of the command on one GPU {result.wanted}. For the same images in all, "
            f"multiply --max_train_steps by {result.wanted}/{answer.images}."
        )
    if answer.host:
        known = "not known; see --host_memory" if where.host is None else f"{gigabytes(where.host)} GB"
        yield (
            f"The training state takes {gigabytes(answer.host)} GB of host memory, of all processes; the machine's memory: "
            f"{known}. At the start each process reads the model, too."
        )


def _notes(result: SeveralPlan) -> Iterator[str]:
    where = result.machine
    yield (
        f"Batch: GPUs x images x accumulated. Seconds are predicted for {where.gpus} {where.gpu.name} with {where.link.name}: "
        "from all communication hidden by computation to none. No two GPUs have been measured."
    )
    if any(not option.is_close for option in result.others):
        yield "Less precise configurations are listed last, and are an answer only if no other one fits."
    for option in (result.answer, *result.others):
        yield f"Drawbacks of {option.candidate.name}: {option.candidate.traded}."


def _as_json(result: SeveralPlan) -> dict[str, Any]:
    def row(option: Setup) -> dict[str, Any]:
        return {
            "name": option.candidate.name,
            "engine": option.engine.value,
            "arguments": list(option.candidate.command.argv),
            "total": option.candidate.estimate.total,
            "reserved": option.candidate.estimate.reserved,
            "host": option.host,
            "images": option.images,
            "gpus": option.machine.gpus,
            "close": option.is_close,
            "seconds": list(option.seconds),
            "seconds_per_image": option.seconds_per_image,
            "traded": option.candidate.traded,
        }

    return {
        "gpus": result.machine.gpus,
        "card": result.machine.card,
        "gpu": result.machine.gpu.name,
        "link": result.machine.link.name,
        "host": result.machine.host,
        "usable": usable_bytes(result.machine.card),
        "answer": row(result.answer),
        "others": [row(option) for option in result.others],
        "too_big": [row(option) for option in result.too_big],
        "alone": None if result.alone is None else row(result.alone),
        "command": quoted(words(result.answer)),
        "calibrated_on_cuda": False,
    }
