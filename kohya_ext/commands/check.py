"""Check arguments, data, models and output folder without training.

Every run starts with the same checks. Takes as long as the script's imports.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kohya_ext import preflight
from kohya_ext.config import training_command
from kohya_ext.config.arguments import take_over
from kohya_ext.console import note, progress
from kohya_ext.launch.session import warn_if_too_large
from kohya_ext.planning import automatic
from kohya_ext.sdscripts.introspect import importable, script_parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; exit with code 2 if the run would fail."""
    request = training_command.read(arguments, automatic, "there is nothing to check")
    checkout, command = request.checkout, request.command
    script = checkout.script(command.name)
    final: list[argparse.Namespace] = []
    sys.argv = [str(script), *command.argv]
    with progress(f"importing {script.name} and checking its arguments"), importable(checkout):
        parser = script_parser(checkout, script)
        take_over(parser, command, final.append)
        # The script reads the config file itself, then the command line again.
        library: Any = sys.modules.get("library.args") or sys.modules["library.train_util"]
        library.read_config_from_file(parser.parse_args(), parser)
        findings = preflight.inspect(script, final[-1], command.settings)
    preflight.report(findings, command.settings.strict)
    warn_if_too_large(checkout, final[-1], command)
    count = len(findings.warnings)
    passed = f"{count} warning{'s' * (count > 1)}" if count else "all checks passed"
    note(f"{script.name} can start; {passed}")
    return 0
