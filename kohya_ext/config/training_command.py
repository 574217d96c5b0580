"""Shared parsing for commands that take a training script: ``python -m kohya_ext COMMAND SCRIPT [its arguments]``.

The command's own options and those of a run may be given before SCRIPT and after it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import add_to, flags, options
from kohya_ext.errors import UserError
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch, is_training_script

#: Adds a command's own options to a parser. Every default is argparse.SUPPRESS, because SCRIPT may come before or after.
AddOwn = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Question:
    """A training command line without the options of the command that reads it, and those options."""

    checkout: Checkout
    command: CommandLine
    own: Mapping[str, Any]
    """The command's own options that were given, by name."""


def _none(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def configure(parser: argparse.ArgumentParser, arguments: str, add_own: AddOwn = _none, is_optional: bool = False) -> None:
    """Add a command's own options, SCRIPT and its arguments. ``arguments`` is the help text of the latter.

    ``is_optional``: without SCRIPT it is None.
    """
    _add(parser, add_own)
    # A run's options are parsed only to separate their values from SCRIPT; `read` passes them on as words.
    of_a_run = parser.add_argument_group()
    free = (name for name, _ in options() if not any(flag in parser._option_string_actions for flag in flags(name)))
    add_to(of_a_run, only=frozenset(free))
    for action in of_a_run._group_actions:
        action.help = argparse.SUPPRESS
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        nargs="?" if is_optional else None,
        help="a training script of sd-scripts: sdxl_train_network.py, sdxl_train.py, ...",
    )
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help=arguments).required = False


def read(
    given: argparse.Namespace, automatic: Callable[[CommandLine, int], str], otherwise: str, add_own: AddOwn = _none
) -> Question:
    """Return the parsed command line; fetch sd-scripts when no checkout is found.

    ``automatic`` resolves ``--preset auto``. Raises UserError for a missing script, and for one that does not train, with
    ``otherwise`` in its message: the consequence for the command.
    """
    before = given.words[: len(given.words) - len(given.arguments) - 1]
    parser = QuietParser(add_help=False)
    _add(parser, add_own)
    own, argv = parser.parse_known_args([*before, *given.arguments])
    checkout = find_or_fetch(vars(own).get("sd_scripts"), given.script)
    script = checkout.script(given.script)
    if not is_training_script(script):
        raise UserError(f"{script.name} is not a training script: {otherwise}")
    return Question(checkout, CommandLine(script, argv, os.environ, automatic), vars(own))


def _add(parser: argparse.ArgumentParser, add_own: AddOwn) -> None:
    add_own(parser)
    parser.add_argument(
        *flags("sd_scripts"),
        type=Path,
        metavar="FOLDER",
        default=argparse.SUPPRESS,
        help="use this sd-scripts checkout instead of searching for one",
    )
