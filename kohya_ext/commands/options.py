"""Show every option of the extension, its variable and its meaning."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from kohya_ext.settings import MASTER_SWITCH, Settings, options


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--markdown", action="store_true", help="as the table that the README has")


def run(arguments: argparse.Namespace) -> int:
    """Show them; return the exit code."""
    if arguments.markdown:
        print(markdown())
        return 0
    table = Table("option", "variable", "default", "meaning")
    for row in rows():
        table.add_row(*row)
    Console().print(table)
    return 0


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (flag, variable, default, meaning) for every option; the master switch, which has no flag, first."""
    yield "", MASTER_SWITCH, "", "1: arm the extension in every plain start of a script; 0: keep it out of every start"
    defaults = Settings()
    for name, option in options():
        default = getattr(defaults, name)
        shown = "off" if default is False else "" if default in (None, ()) else str(default)
        flag = f"--{name}" + (f" {option.metavar}" if option.metavar else "")
        yield flag, option.environment or "", shown, option.help


def markdown() -> str:
    """Return the table in Markdown."""
    lines = ["| option | variable | default | meaning |", "|---|---|---|---|"]
    for flag, variable, default, meaning in rows():
        cells = (f"`{flag}`" if flag else "", f"`{variable}`" if variable else "", default, meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)
