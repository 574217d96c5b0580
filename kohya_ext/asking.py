"""What the commands about a run have in common: ``python -m kohya_ext COMMAND [options] SCRIPT [its arguments, options]``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.arguments import QuietParser
from kohya_ext.errors import UserError
from kohya_ext.sdscripts import Checkout, find_or_fetch, is_training_script

#: Adds a command's own options to a parser, every default argparse.SUPPRESS: they are read before SCRIPT and behind it.
AddOwn = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Question:
    """A training command line, and what a command is asked of it."""

    checkout: Checkout
    script: Path
    argv: list[str]
    """The script's arguments, the command's own options taken out."""
    own: Mapping[str, Any]
    """The command's own options that were given, by name."""


def _none(parser: argparse.ArgumentParser) -> None:
    """For a command that has no options of its own."""


def configure(parser: argparse.ArgumentParser, arguments: str, add_own: AddOwn = _none) -> None:
    """Add a command's own options, SCRIPT and its arguments, which are described as ``arguments``."""
    _add(parser, add_own)
    parser.add_argument(
        "script", metavar="SCRIPT", help="a training script of sd-scripts: sdxl_train_network.py, sdxl_train.py, ..."
    )
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=arguments)


def read(given: argparse.Namespace, otherwise: str, add_own: AddOwn = _none) -> Question:
    """Return what is asked; fetch sd-scripts where there is none.

    Raises UserError when there is no such script, or none that trains: ``otherwise`` says what that means to the command.
    """
    behind = QuietParser(add_help=False, allow_abbrev=False)
    _add(behind, add_own)
    options, argv = behind.parse_known_args(given.arguments)
    own = {**vars(given), **vars(options)}
    checkout = find_or_fetch(own.get("sd_scripts"), given.script)
    script = checkout.script(given.script)
    if not is_training_script(script):
        raise UserError(f"{script.name} is not a training script: {otherwise}")
    return Question(checkout, script, argv, own)


def _add(parser: argparse.ArgumentParser, add_own: AddOwn) -> None:
    add_own(parser)
    parser.add_argument(
        "--sd-scripts",
        type=Path,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="the checkout to use, instead of looking for one",
    )
