"""List every option with its environment variable and default."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.padding import Padding

from kohya_ext.config.settings import MASTER_SWITCH, options
from kohya_ext.output import Console


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    console = Console(highlight=False)
    for flag, variable, default, meaning in rows():
        head = "  ".join(filter(None, [flag, variable, default and f"(default: {default})"]))
        console.print(head, markup=False, soft_wrap=True)
        console.print(Padding(meaning, (0, 0, 0, 4), expand=False), markup=False)
    return 0


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield (flag, variable, default, meaning) for every option; the master switch, which has no flag, first."""
    yield "", MASTER_SWITCH, "", "1: apply the extension in every plain start of a script; 0: never apply it"
    for name, option in options():
        default = option.default
        shown = {False: "off", True: "on"}.get(default, default) if isinstance(default, bool) else default
        flag = f"--{name}" + (f" {option.metavar}" if option.metavar else "")
        yield flag, option.variable or "", "" if shown in (None, ()) else str(shown), option.help
