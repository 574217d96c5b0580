"""List presets, show one, and explain where each value comes from."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from kohya_ext.config import preset_files
from kohya_ext.config.arguments import complete, find_problem, find_problems, preset_line, trace
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import flags
from kohya_ext.console import note, progress, warn
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, machine, step_time
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.result import Estimate
from kohya_ext.output import Console
from kohya_ext.planning import automatic, tiers, upstream
from kohya_ext.planning.tiers import Tier
from kohya_ext.sdscripts.checkouts import find_or_fetch, is_training_script
from kohya_ext.sdscripts.introspect import script_parser
from kohya_ext.units import gigabytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _add_checkout(parser)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | show | path")
    actions.add_parser("list", help="list every preset with its scripts and memory")
    where = actions.add_parser("path", help="print the path of a preset's file")
    where.add_argument("name", help="family/name, as `presets list` shows it")
    show = actions.add_parser("show", help="show every key of a preset with its value and reason")
    show.add_argument("names", nargs="+", metavar="NAME", help="presets, stacked in this order")
    show.add_argument(
        "--script",
        help="the script; default for a full preset name (sdxl-lora/16gb): the first script of its family",
    )
    show.add_argument(
        "--explain",
        action="store_true",
        help="check against the script's own parser, and show the origin of each value of a command line",
    )
    _add_checkout(show)
    show.add_argument(
        "--with",
        dest="arguments",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="ARGUMENT",
        help="with --explain: the script's own arguments, to the end of the line",
    )


def _add_checkout(parser: argparse.ArgumentParser) -> None:
    """Add ``--sd-scripts``, accepted before and after the action."""
    parser.add_argument(
        *flags("sd_scripts"),
        type=Path,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="the sd-scripts checkout to check against; default: search for one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    console = Console()
    if arguments.action == "list":
        _list(console)
    elif arguments.action == "path":
        print(_path(arguments.name))
    else:
        script = arguments.script or _script(arguments.names)
        console.print(_explain(arguments, script) if arguments.explain else _show(arguments, script))
    return 0


def _script(names: Sequence[str]) -> str:
    """Return the first script of the first preset with a family. Raises UserError if there is none."""
    for name in names:
        family = _family(name)
        if family not in (None, "", preset_files.ANY):
            return next(iter(preset_files.scripts(str(family)) or preset_files.FAMILIES))  # loading reports an unknown family
    raise UserError(
        f"{names[0]} is a different preset for each family; give --script sdxl_train_network.py, for example, or a full name "
        "from `presets list` such as sdxl-lora/16gb"
    )


def _family(name: str) -> str | None:
    file = Path(name).expanduser()
    if file.suffix == ".toml" and file.is_file():
        return preset_files.parse(file.read_text(encoding="utf-8"), name, None).family
    return name.lower().rpartition("/")[0]


def _list(console: Console) -> None:
    families: dict[str, Table] = {}
    for row in rows(machine.gpu()):
        head = ("preset", "needs", "speed", "s/image", "upstream", "summary", "drawbacks")
        table = families.setdefault(row.family, Table(*head, box=None, pad_edge=False))
        seconds = map(seconds_text, (row.seconds, row.upstream))
        table.add_row(row.name, row.needs, row.speed, *seconds, row.summary, row.drawbacks)
    for family, table in families.items():
        named = "every script" if family == preset_files.ANY else ", ".join(preset_files.scripts(family))
        base = preset_files.base(family)
        if base is not None and "traded" in base.about:
            table.caption = f"drawbacks at every size, unless listed otherwise: {base.about['traded']}"
            table.caption_justify = "left"
        console.print(f"[bold]{family}[/] ({named})", table, "", highlight=False)
    console.print(NOTE, highlight=False)


#: The meaning of the columns.
NOTE = (
    "GB is 1e9 bytes. needs: predicted reserved memory and 0.6 GB for the CUDA context, not compared with a GeForce GPU. "
    "s/image: predicted seconds on this machine's GPU, or on a common one of the preset's size, without further options. "
    "speed: relative to the family's fastest preset at that resolution that is not experimental. upstream: seconds of the "
    "fastest configuration of sd-scripts' own options that fits a GPU of that size. Nine in ten published times differ "
    "from such predictions by less than half; both columns share most of that error."
)


@dataclass(frozen=True)
class Row:
    """A preset, its texts empty and its figures None where they are not known."""

    family: str
    name: str
    needs: str = ""
    left: str = ""
    """Of the GPU."""
    speed: str = ""
    gpu: str = ""
    seconds: float | None = None
    """Per image on the GPU."""
    upstream: float | None = None
    """Seconds per image of upstream's fastest configuration there; infinite where nothing fits."""
    options: str = ""
    """Upstream's options for it."""
    summary: str = ""
    drawbacks: str = ""


def rows(gpu: Gpu | None = None) -> Iterator[Row]:
    """Yield a row for every preset, with its speed on ``gpu``, or on a common one of the preset's size."""
    usual = [*tiers.tiers()]
    known = {tier.name: tier for tier in [*usual, *tiers.tiers(experimental=True)]}
    for family, name, _ in preset_files.shipped():
        about = preset_files.load([f"{family}/{name}"], preset_files.scripts(family)[0]).presets[-1].about
        row = Row(family, name, summary=str(about.get("summary", "")), drawbacks=str(about.get("traded", "")))
        tier = known.get(f"{family}/{name}")
        yield row if tier is None or tier.estimate is None else _with_figures(row, tier, tier.estimate, usual, gpu)


def _with_figures(row: Row, tier: Tier, estimate: Estimate, usual: Sequence[Tier], gpu: Gpu | None) -> Row:
    card = gpu or gpus.typical(tier.card)
    needs, left = (f"{gigabytes(size)} GB" for size in (estimate.total, tier.card - estimate.total))
    ratio = tiers.speed(tier, usual, card)
    other = upstream.fastest(tier)
    return replace(
        row,
        needs=needs,
        left=left,
        speed="" if ratio is None else f"{ratio:.0%}",
        gpu=card.name,
        seconds=None if ratio is None else step_time.seconds_per_image(estimate, card),
        upstream=math.inf if other is None else step_time.seconds_per_image(other.estimate, card),
        options="" if other is None else other.options,
    )


def seconds_text(seconds: float | None) -> str:
    """Return a row's seconds as text."""
    if seconds is None:
        return ""
    return "does not fit" if math.isinf(seconds) else step_time.format_seconds(seconds)


def _path(preset: str) -> str:
    family, _, name = preset.partition("/")
    file = preset_files.file_of(family, name)
    if file is None:
        raise UserError(f"no preset {preset}; `presets list` shows all")
    return str(file)


def _show(arguments: argparse.Namespace, script: str) -> Table:
    argv = [part for name in arguments.names for part in ("--preset", name)]
    presets = CommandLine(Path(script), argv, os.environ, automatic).presets
    table = Table("key", "value", "preset", "why", title=escape(presets.label))
    for key, value in presets.values.items():
        table.add_row(key, escape(repr(value.value)), value.preset, escape(value.why))
    return table


def _explain(arguments: argparse.Namespace, name: str) -> Table:
    checkout = find_or_fetch(vars(arguments).get("sd_scripts"), name)
    script = checkout.script(name)
    if not is_training_script(script):
        raise UserError(f"presets only apply to training scripts, not {script.name}")
    argv = [*(part for name in arguments.names for part in ("--preset", name)), *arguments.arguments]
    command = CommandLine(script, argv, os.environ, automatic)
    settled = command.presets  # an unknown one is reported before the script's imports
    with progress(f"importing {script.name} to read its arguments"):
        parser = script_parser(checkout, script)
    complete(parser)
    wrong = [
        str(problem) for key, value in settled.values.items() if (problem := find_problem(parser, key, value.value)) is not None
    ]
    if wrong:
        raise UserError("\n".join(wrong))
    if command.config is not None:
        for problem in find_problems(parser, command.config):
            warn(f"{command.config.path}: {problem}")
    note(preset_line(command))
    table = Table("key", "value", "from", "why", title=f"{script.name}, {checkout.label}, preset {command.presets.label}")
    for traced in trace(parser, command):
        table.add_row(traced.key, escape(repr(traced.value)), escape(traced.origin), escape(traced.why))
    return table
