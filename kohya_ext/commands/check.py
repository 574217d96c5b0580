"""Check arguments, data, models and output folder without training.

Every run starts with the same checks. Takes as long as the script's imports.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from kohya_ext import preflight
from kohya_ext.config import training_command
from kohya_ext.config.arguments import read_arguments, take_over
from kohya_ext.console import note, progress
from kohya_ext.sdscripts.introspect import importable, script_parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Look and say; leave with exit code 2 when the run would fail."""
    asked = training_command.read(arguments, "there is nothing to check")
    checkout, script = asked.checkout, asked.script
    resolved = read_arguments(script.name, asked.argv, os.environ)
    final: list[argparse.Namespace] = []
    sys.argv = [str(script), *asked.argv]
    with progress(f"importing {script.name} and checking its arguments"), importable(checkout):
        parser = script_parser(checkout, script)
        take_over(parser, resolved, final.append)
        # The script's own reading of the config file, on top of which the command line is read once more.
        library: Any = sys.modules.get("library.args") or sys.modules["library.train_util"]
        library.read_config_from_file(parser.parse_args(), parser)
        found = preflight.inspect(script, final[-1], resolved.settings)
    preflight.report(found, resolved.settings.strict)
    note(f"{script.name} can start: nothing was found that would stop it")
    return 0
