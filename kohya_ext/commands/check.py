"""Check a training script's arguments, pictures, captions, model files and output folder, without training.

The same is done at the start of every run; takes as long as the script's imports.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kohya_ext import preflight
from kohya_ext.config import training_command
from kohya_ext.config.arguments import take_over
from kohya_ext.console import note, progress
from kohya_ext.planning import automatic
from kohya_ext.sdscripts.introspect import importable, script_parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Look and say; leave with exit code 2 when the run would fail."""
    asked = training_command.read(arguments, automatic, "there is nothing to check")
    checkout, command = asked.checkout, asked.command
    script = checkout.script(command.name)
    final: list[argparse.Namespace] = []
    sys.argv = [str(script), *command.argv]
    with progress(f"importing {script.name} and checking its arguments"), importable(checkout):
        parser = script_parser(checkout, script)
        take_over(parser, command, final.append)
        # The script's own reading of the config file, on top of which the command line is read once more.
        library: Any = sys.modules.get("library.args") or sys.modules["library.train_util"]
        library.read_config_from_file(parser.parse_args(), parser)
        found = preflight.inspect(script, final[-1], command.settings)
    preflight.say(found, command.settings.strict)
    note(f"{script.name} can start: nothing was found that would stop it")
    return 0
