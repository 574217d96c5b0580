"""The fastest configuration of a script that fits a card, what it gives up, and the command line for it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from kohya_ext import units as cards
from kohya_ext.commands.estimate import NOT_CALIBRATED
from kohya_ext.config import training_command
from kohya_ext.config.command_line import quoted
from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.planning import automatic
from kohya_ext.planning.plan import Candidate, Plan, plan
from kohya_ext.planning.tiers import room
from kohya_ext.units import gigabytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments that are to stay as they are", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="as JSON, sizes in bytes")
    parser.add_argument(
        "--vram",
        metavar="SIZE",
        default=argparse.SUPPRESS,
        help='the GPU, instead of the one in this machine, by the size it is sold as: 16, 16gb and "16 GB" are the same; '
        "15.5GiB and a number of bytes are exact",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    asked = training_command.read(arguments, automatic, "nothing to plan", _add_own)
    own = asked.own
    # A preset from the environment would not be in the command line that comes out.
    environ = {name: value for name, value in os.environ.items() if name != "KOHYA_EXT_PRESET"}
    command = replace(asked.command, environ=environ)
    settings = command.with_tier(None).with_({"vram": own["vram"]} if "vram" in own else {}).settings
    size = settings.vram
    name, card = ("", size) if size else cards.find() or ("", 0)
    if not card:
        raise UserError("no NVIDIA GPU found: give the size of the one to plan for, --vram 16")
    made = plan(asked.checkout, command, card, note)
    words = ["python", "-m", "kohya_ext", command.name, *made.answer.command.argv]
    if own.get("json"):
        print(json.dumps(_as_json(made, words), indent=1))
    else:
        _show(Console(), made, name, command.name, words, settings.selective_torch_compile)
    return 0


def _show(console: Console, made: Plan, name: str, script: str, words: Sequence[str], compiled: bool) -> None:
    card = f"the {cards.label(made.card)}{name and f', {name}'}"
    table = Table("", "on the card", "TFLOP a picture", "what it gives up", title=f"{script} on {card}")
    for heading, candidates in (
        ("answer", [made.answer]),
        ("next best", made.others),
        ("too big", made.too_big[:2]),
    ):
        for one in candidates:
            size = f"{gigabytes(one.found.on_the_card)} GB"
            table.add_row(f"{heading}: {one.name}", size, f"{one.found.flops_a_picture / 1e12:.1f}", one.traded)
    console.print(table)
    tree = Table("", "step", "sets", "what it costs", title="the decision tree, the cheapest step first")
    tree.columns[2].overflow = "fold"  # a word of a command line is of no use cut short
    for branch in made.tree:
        tree.add_row(branch.status, branch.rung.name, " ".join(branch.words), branch.costs)
    console.print(tree)
    for line in (
        f"Room: {gigabytes(room(made.card))} GB, 5 percent are left free; {NOT_CALIBRATED}. Fewer swapped blocks rank first, "
        "then fewer operations per image. The time that copying blocks takes and larger batches save depends on the GPU.",
        "Batch and accumulation are one process's.",
        *(["The figures are those without compiling, which needs more; `estimate` has those with it."] if compiled else []),
        "To run it:",
    ):
        console.print(line, highlight=False, soft_wrap=True)
    print(f"  {quoted(words)}")


def _as_json(made: Plan, words: Sequence[str]) -> dict[str, Any]:
    def row(one: Candidate) -> dict[str, Any]:
        return {
            "name": one.name,
            "arguments": list(one.command.argv),
            "on_the_card": one.found.on_the_card,
            "reserved": one.found.reserved,
            "flops_a_picture": one.found.flops_a_picture,
            "traded": one.traded,
        }

    return {
        "card": made.card,
        "room": room(made.card),
        "answer": row(made.answer),
        "others": [row(one) for one in made.others],
        "too_big": [row(one) for one in made.too_big],
        "tree": [
            {"step": branch.rung.name, "status": branch.status, "sets": list(branch.words), "costs": branch.costs,
             "exact": branch.rung.exact}
            for branch in made.tree
        ],
        "command": quoted(words),
        "calibrated_on_cuda": False,
    }  # fmt: skip
