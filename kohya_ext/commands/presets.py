"""List the presets, show one, and explain where every value of a command line comes from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kohya_ext import overlay
from kohya_ext.arguments import complete, find_problem, read_arguments, trace
from kohya_ext.console import warn
from kohya_ext.errors import UserError
from kohya_ext.probing import script_parser
from kohya_ext.sdscripts import find_or_fetch, is_training_script


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | show | path")
    actions.add_parser("list", help="every preset, its scripts and what it needs")
    where = actions.add_parser("path", help="where a preset's file lies, to read or to copy")
    where.add_argument("name", help="family/name, as `presets list` shows it")
    show = actions.add_parser("show", help="every key of a preset, its value and why it is there")
    show.add_argument("names", nargs="+", metavar="NAME", help="presets, stacked in this order")
    show.add_argument("--script", required=True, help="the script it is for: sdxl_train.py, sdxl_train_network.py, ...")
    show.add_argument(
        "--explain",
        action="store_true",
        help="check it against the script's own parser and say where each value of a whole command line comes from",
    )
    show.add_argument(
        "--sd-scripts", type=Path, metavar="FOLDER", help="the checkout to check against, instead of looking for one"
    )
    show.add_argument(
        "--with",
        dest="arguments",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARGUMENT",
        help="with --explain: the script's own arguments, up to the end of the line",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; return the exit code."""
    console = Console()
    if arguments.action == "list":
        _list(console)
    elif arguments.action == "path":
        print(_path(arguments.name))
    elif arguments.explain:
        console.print(_explain(arguments))
    else:
        console.print(_show(arguments))
    return 0


def _list(console: Console) -> None:
    families: dict[str, Table] = {}
    for family, name, file in overlay.shipped():
        table = families.setdefault(family, Table("preset", "card", "predicted peak", "what it is", box=None, pad_edge=False))
        about = overlay.parse(file.read_text(encoding="utf-8"), name, family).about
        peak = about.get("peak_gb")
        reserved = f"{peak['reserved']} GB" if isinstance(peak, dict) else "no more"
        card = f"{about['vram_gb']} GB" if "vram_gb" in about else "any"
        table.add_row(name, card, reserved, str(about.get("summary", "")))
    for family, table in families.items():
        scripts = [script for script, its in overlay.FAMILIES.items() if its == family]
        console.print(f"[bold]{family}[/] ({', '.join(scripts)})", table, "")


def _path(wanted: str) -> str:
    for family, name, file in overlay.shipped():
        if wanted == f"{family}/{name}":
            return str(file)
    raise UserError(f"no preset {wanted}: `presets list` shows them")


def _show(arguments: argparse.Namespace) -> Table:
    table = Table("key", "value", "preset", "why", title=escape(" + ".join(arguments.names)))
    for key, value in overlay.load(arguments.names, arguments.script).values.items():
        table.add_row(key, escape(repr(value.value)), value.preset, escape(value.why))
    return table


def _explain(arguments: argparse.Namespace) -> Table:
    checkout = find_or_fetch(arguments.sd_scripts, "--sd-scripts", arguments.script)
    script = checkout.script(arguments.script)
    if not is_training_script(script):
        raise UserError(f"{script.name} is not a training script: presets have no meaning for it")
    argv = [*(part for name in arguments.names for part in ("--preset", name)), *arguments.arguments]
    resolved = read_arguments(script.name, argv, os.environ)
    parser = script_parser(checkout, script)
    complete(parser)
    problems = [
        problem
        for key, value in resolved.presets.values.items()
        if (problem := find_problem(parser, key, value.value)) is not None
    ]
    if problems:
        raise UserError("\n".join(problems))
    for key, setting in (resolved.config.values if resolved.config else {}).items():
        if (problem := find_problem(parser, key, setting)) is not None:
            warn(problem)
    table = Table("key", "value", "from", "why", title=f"{script.name}, {checkout.label}, preset {resolved.presets.label}")
    for traced in trace(parser, resolved, argv):
        table.add_row(traced.key, escape(repr(traced.value)), escape(traced.origin), escape(traced.why))
    return table
