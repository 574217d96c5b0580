"""Show every option of the extension, its variable and its meaning."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kohya_ext.commands import presets
from kohya_ext.config.settings import MASTER_SWITCH, options
from kohya_ext.config.user_files import read_text
from kohya_ext.patching.patch import registry


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the tables between the marks in a Markdown file anew")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code. Raises UserError for a file that cannot be read."""
    if arguments.write:
        text = read_text(arguments.write, f"--write {arguments.write}")
        arguments.write.write_text(with_tables(text), encoding="utf-8")
        return 0
    table = Table("option", "variable", "default", "meaning", box=None, pad_edge=False)
    for flag, variable, default, meaning in rows():
        table.add_row(flag, variable, default, meaning)
    Console(highlight=False).print(table)
    return 0


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (flag, variable, default, meaning) for every option; the master switch, which has no flag, first."""
    yield "", MASTER_SWITCH, "", "1: arm the extension in every plain start of a script; 0: keep it out of every start"
    for name, option in options():
        default = option.default
        shown = {False: "off", True: "on"}.get(default, default) if isinstance(default, bool) else default
        flag = f"--{name}" + (f" {option.metavar}" if option.metavar else "")
        yield flag, option.variable or "", "" if shown in (None, ()) else str(shown), option.help


def with_tables(text: str) -> str:
    """Return a Markdown text with the tables of options, presets and patches between their marks as they are now."""
    tables = {"options": _options(), "presets": _presets(), "patches": _patches()}
    for name, table in tables.items():
        before, mark, rest = text.partition(f"<!-- {name} -->")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if mark and end:
            text = f"{before}{mark}\n{table}\n{end}{after}"
    return text


def _options() -> str:
    shown = ([f"`{flag}`" if flag else "", f"`{variable}`" if variable else "", *rest] for flag, variable, *rest in rows())
    return _markdown(("option", "variable", "default", "meaning"), shown)


def _presets() -> str:
    lines = ([f"`{family}/{name}`", *rest] for family, name, *rest, _ in presets.rows())
    return _markdown(("preset", "needs", "left free", "speed", "what it is"), lines)


def _patches() -> str:
    lines = ((f"`{patch.name}`", patch.summary, f"{patch.exactness}: {patch.held_to}") for patch in registry().values())
    return _markdown(("patch", "what it does", "results"), lines)


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
