"""List presets, show one, and explain where each value comes from."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kohya_ext.config import fluxgym_form, gui_form, lora_easy_form, preset_files
from kohya_ext.config.arguments import Traced, complete, find_problem, find_problems, preset_line, trace
from kohya_ext.config.command_line import CommandLine, option_words, quoted
from kohya_ext.config.settings import flags
from kohya_ext.console import note, progress, warn
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, machine, step_time
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.result import Estimate
from kohya_ext.output import Console
from kohya_ext.planning import automatic, chosen_speed, tiers, upstream
from kohya_ext.planning.tiers import Tier
from kohya_ext.renames import replace_text
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.checkouts import find_or_fetch, is_training_script
from kohya_ext.sdscripts.introspect import script_parser
from kohya_ext.units import GIB, SMALLEST_SHARE, gigabytes, read_card


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _add_checkout(parser)
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | show | path | export")
    every = actions.add_parser("list", help="list presets with their memory and seconds")
    every.add_argument("--script", help="the presets of this script alone")
    every.add_argument("--vram", metavar="SIZE", help='the presets for a GPU of this size alone: 12, 12gb or "12 GB"')
    every.add_argument("--verbose", action="store_true", help="also print drawbacks, and the seconds of sd-scripts alone")
    where = actions.add_parser("path", help="print the path of a preset's file")
    where.add_argument("name", help="family/name, as `presets list` shows it")
    export = actions.add_parser("export", help="write presets as a file for a GUI, or as lines for fluxgym")
    export.add_argument("names", nargs="+", metavar="NAME", help="presets, stacked in this order")
    export.add_argument(
        "--for", dest="consumer", choices=("kohya_ss", "fluxgym", "lora_easy"), required=True, help="the program"
    )
    export.add_argument("--script", help="the script; default for a full preset name: the first script of its family")
    export.add_argument(
        "--output",
        type=Path,
        metavar="PATH",
        help="a file, a folder, or the kohya_ss GUI's folder, where the file is in its list of presets; default: the current "
        "folder. With --for lora_easy, a file that was saved there keeps its other entries",
    )
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
        _list(console, arguments.script, arguments.vram, arguments.verbose)
    elif arguments.action == "path":
        print(_path(arguments.name))
    elif arguments.action == "export" and arguments.consumer == "fluxgym":
        if arguments.output is not None:
            raise UserError("--output is for the other programs; the lines for fluxgym are printed")
        _print_for_fluxgym(arguments.names, arguments.script or families.BY_NAME["flux"].lora)
    elif arguments.action == "export" and arguments.consumer == "lora_easy":
        _write_for_lora_easy(arguments.names, arguments.script or _script(arguments.names), arguments.output or Path())
    elif arguments.action == "export":
        _export(arguments.names, arguments.script or _script(arguments.names), arguments.output or Path())
    else:
        script = arguments.script or _script(arguments.names)
        (_explain if arguments.explain else _show)(console, arguments, script)
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


def _list(console: Console, script: str | None, vram: str | None, verbose: bool) -> None:
    if script is not None and not _folders(script):
        raise UserError(f"{script} has no presets of its own; those for every script: {', '.join(_names(preset_files.ANY))}")
    wanted = None if script is None else [*_folders(script), *([] if vram is not None else [preset_files.ANY])]
    gpu = machine.gpu()
    families: dict[str, list[Row]] = {}
    for family in _families():
        if wanted is None or family in wanted:
            listed = list(rows(gpu, family, None if vram is None else _of_size(family, vram)))
            families |= {family: listed} if listed else {}
    for family, listed in families.items():
        named = "every script" if family == preset_files.ANY else ", ".join(preset_files.scripts(family))
        base = preset_files.base(family)
        drawbacks = f"Drawbacks of all: {base.about['traded']}." if verbose and base and "traded" in base.about else None
        parts = [f"[bold]{family}[/] ({named})", _table(listed, verbose), *filter(None, [drawbacks])]
        console.print(*parts, *([] if vram is not None else [""]), sep="\n", highlight=False)
    if vram is not None:
        common = ", ".join(_names(preset_files.ANY))
        console.print(f"For every script, to combine with one of these: {common}.", highlight=False)
    console.print(NOTE if verbose else SHORT_NOTE, highlight=False)


def _folders(script: str) -> list[str]:
    """Return the folders of a script's own presets."""
    name = Path(script).name
    name = name if name.endswith(".py") else f"{name}.py"
    return [family for family in _families() if family != preset_files.ANY and name in preset_files.scripts(family)]


def _families() -> list[str]:
    return list(dict.fromkeys(family for family, _, _ in preset_files.shipped()))


def _names(family: str) -> list[str]:
    return [name for folder, name, _ in preset_files.shipped() if folder == family]


def _of_size(family: str, vram: str) -> list[str]:
    """Return a family's tiers for a GPU of a size, and its presets without a size."""
    size = read_card(vram) / GIB / SMALLEST_SHARE
    sizes = {name: preset_files.tier_of(name) for name in _names(family)}
    best: dict[str, tuple[int, str]] = {}
    for name, tier in sizes.items():
        if tier is not None and tier.gb <= size:
            best[tier.kind] = max(best.get(tier.kind, (0, "")), (tier.gb, name))
    others = [] if family == preset_files.ANY else [name for name, tier in sizes.items() if tier is None]
    return [*(name for _, name in best.values()), *others]


def _table(listed: Sequence[Row], verbose: bool) -> Table:
    more_heads = ("chosen", "upstream") if verbose else ()
    head = ("preset", "needs", "s/image", *more_heads, "summary", *(("drawbacks",) * verbose))
    table = Table(*head, box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in listed:
        more = (row.chosen, seconds_text(row.upstream)) if verbose else ()
        cells = (row.name, row.needs, seconds_text(row.seconds), *more, row.summary, *((row.drawbacks,) * verbose))
        table.add_row(*cells)
    return table


#: The meaning of the columns.
SHORT_NOTE = "needs: predicted GPU memory; s/image: predicted seconds. --verbose prints more."

NOTE = (
    "GB is 1e9 bytes. needs: predicted reserved memory and 0.6 GB for the CUDA context, not compared with a GeForce GPU. "
    "s/image: predicted seconds on this machine's GPU, or on a common one of the preset's size, without further options, "
    "with the chosen features. chosen: what --speed is predicted to turn on there. upstream: seconds of the fastest "
    "configuration of sd-scripts' own options that fits a GPU of that size. Nine in ten published times differ from such "
    "predictions by less than half; both columns share most of that error."
)


@dataclass(frozen=True)
class Row:
    """A preset, its texts empty and its figures None where they are not known."""

    family: str
    name: str
    needs: str = ""
    """GPU memory with the chosen features."""
    gpu: str = ""
    seconds: float | None = None
    """Per image on the GPU, with the chosen features."""
    chosen: str = ""
    """The features that ``--speed`` is predicted to turn on there."""
    windows: Sequence[float] = ()
    """Seconds under Windows, without and with Triton."""
    upstream: float | None = None
    """Seconds per image of upstream's fastest configuration there; infinite where nothing fits."""
    options: str = ""
    """Upstream's options for it."""
    summary: str = ""
    drawbacks: str = ""


def rows(gpu: Gpu | None = None, only: str | None = None, names: Collection[str] | None = None) -> Iterator[Row]:
    """Yield a row for every preset, with its speed on ``gpu``, or on a common one of the preset's size.

    ``only`` leaves one family, and ``names`` some of its presets.
    """
    known = {tier.name: tier for tier in (*tiers.tiers(only), *tiers.tiers(only, experimental=True))}
    for family, name, _ in preset_files.shipped():
        if (only is not None and family != only) or (names is not None and name not in names):
            continue
        about = preset_files.load([f"{family}/{name}"], preset_files.scripts(family)[0]).presets[-1].about
        row = Row(family, name, summary=str(about.get("summary", "")), drawbacks=str(about.get("traded", "")))
        tier = known.get(f"{family}/{name}")
        yield row if tier is None or tier.estimate is None else _with_figures(row, tier, tier.estimate, gpu)


def _with_figures(row: Row, tier: Tier, estimate: Estimate, gpu: Gpu | None) -> Row:
    card = gpu or gpus.typical(tier.card)
    best, other = chosen_speed.of_tier(tier, card), upstream.fastest(tier)
    windows = [chosen_speed.of_tier(tier, gpus.on(gpus.WINDOWS, card), triton) for triton in (False, True)]
    return replace(
        row,
        needs=f"{gigabytes((estimate if best is None else best.estimate).total)} GB",
        gpu=card.name,
        seconds=None if best is None else best.seconds_per_image,
        chosen="" if best is None else best.words,
        windows=tuple(each.seconds_per_image for each in windows if each is not None),
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


def _show(console: Console, arguments: argparse.Namespace, script: str) -> None:
    argv = [part for name in arguments.names for part in ("--preset", name)]
    presets = CommandLine(Path(script), argv, os.environ, automatic).presets
    rows = (Traced(key, value.value, value.preset, value.why) for key, value in presets.values.items())
    _print_keys(console, presets.label, rows)


def _export(names: Sequence[str], script: str, output: Path) -> None:
    """Write presets as a file that the GUI loads, and print how."""
    presets = CommandLine(Path(script), [part for name in names for part in ("--preset", name)], os.environ, automatic).presets
    values = {key: value.value for key, value in presets.values.items()}
    family = families.of(script, values)
    if family is None or not any("vram_gb" in preset.about for preset in presets.presets):
        raise UserError(f"{' '.join(names)}: no GPU size; name one too, for example `presets export 12gb --for kohya_ss`")
    applied = presets.label.partition(" (")[0].split(" + ")
    trains_network = script == family.lora
    fields = gui_form.form(values, family.name, applied, trains_network)
    file = _file_of_export(output, " ".join(applied).replace("/", " "), "lora" if trains_network else "finetune")
    replace_text(file, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    print(file)
    tab = "LoRA" if trains_network else "Finetuning or Dreambooth"
    note(f"In the GUI's {tab} tab, open it under Configuration; kohya_ext must be on there (docs/presets.md).")
    left = [key for key, value in presets.values.items() if gui_form.lacks(key)]
    if left:
        note(f'set by --preset in "Additional parameters", which the file fills in: {", ".join(left)}')


def _print_for_fluxgym(names: Sequence[str], script: str) -> None:
    """Print presets as lines for fluxgym's script, and how to use them."""
    if script != families.BY_NAME["flux"].lora:
        raise UserError(f"fluxgym trains LoRAs of FLUX, with {families.BY_NAME['flux'].lora}, not with {script}")
    presets = CommandLine(Path(script), [part for name in names for part in ("--preset", name)], os.environ, automatic).presets
    values = {key: value.value for key, value in presets.values.items()}
    for line in fluxgym_form.lines(values, "^" if os.name == "nt" else "\\"):
        print(line)
    data = f"resolution {values['resolution']} and batch_size {values.get('train_batch_size', 1)}"
    note(
        'In fluxgym, choose 20G under "VRAM", and add these lines at the end of "Train script"; kohya_ext must be on there '
        f'(docs/guis.md). Set {data} in "Train config".'
    )
    if presets.assumed:
        note(f"the preset assumes {quoted(option_words(presets.assumed))}; change that in the script, too")


def _write_for_lora_easy(names: Sequence[str], script: str, output: Path) -> None:
    """Write presets as a file that LoRA_Easy_Training_Scripts loads, or into one that was saved there, and print how."""
    presets = CommandLine(Path(script), [part for name in names for part in ("--preset", name)], os.environ, automatic).presets
    values = {key: value.value for key, value in presets.values.items()}
    family = families.of(script, values)
    trained = [families.BY_NAME[name] for name in lora_easy_form.FAMILIES]
    if family not in trained or script != family.lora:
        scripts = ", ".join(each.lora for each in trained)
        raise UserError(f"LoRA_Easy_Training_Scripts trains LoRAs with {scripts}, not {' '.join(names)}")
    applied = presets.label.partition(" (")[0].split(" + ")
    is_file = output.suffix == ".toml"
    file = output if is_file else output / f"kohya_ext {' '.join(applied).replace('/', ' ')}.toml"
    saved = lora_easy_form.read(file) if is_file and file.exists() else {}
    replace_text(file, lora_easy_form.text(lora_easy_form.form(values, family.name, applied, saved)))
    print(file)
    note("In its window, open it with File > Load Toml; kohya_ext must be on there (docs/guis.md).")
    if not saved:
        note(
            "Loading replaces the whole form. To keep your entries, save them with File > Save Toml first, and add that file "
            "to this command: --output FILE"
        )
    left = [key for key, value in presets.values.items() if lora_easy_form.lacks(key)]
    if left:
        note(f'set by preset in "Extra Args", which the file fills in: {", ".join(left)}')
    for key in filter(values.__contains__, lora_easy_form.INEXPRESSIBLE):
        note(f'left out: {key}={values[key]}; the form has "Warmup Ratio" instead')
    if presets.assumed:
        note(f"the preset assumes {quoted(option_words(presets.assumed))}; choose that in the form, too")


def _file_of_export(output: Path, name: str, kind: str) -> Path:
    """Return the file to write: ``output`` itself, or one in a folder, or in the presets of a GUI's folder."""
    if output.suffix == ".json":
        return output
    if (output / "kohya_gui.py").is_file():
        output = output / "presets" / kind / "user_presets"
    return output / f"kohya_ext {name}.json"


def _print_keys(console: Console, title: str, rows: Iterable[Traced]) -> None:
    """Print each key with its value and origin on a line of its own, which is never cut, and the reason below it."""
    console.print(f"[bold]{escape(title)}[/]", highlight=False)
    for row in rows:
        console.print(f"{row.key} = {value_text(row.value)}  ({row.origin})", markup=False, highlight=False, soft_wrap=True)
        if row.why:
            console.print(Padding(Text(row.why), (0, 0, 0, 4), expand=False))


def value_text(value: object) -> str:
    """Return a value as it is written on a command line or in a TOML file, without quotes."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _explain(console: Console, arguments: argparse.Namespace, name: str) -> None:
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
    title = f"{script.name}, {checkout.label}, preset {command.presets.label}"
    _print_keys(console, title, trace(parser, command))
