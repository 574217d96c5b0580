"""Check a training script's arguments, pictures, captions, model files and output folder, without training.

The same is done at the start of every run; takes as long as the script's imports.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from kohya_ext import preflight
from kohya_ext.arguments import read_arguments, take_over
from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.probing import importable, script_parser
from kohya_ext.sdscripts import find_or_fetch, is_training_script


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER", help="the checkout to use, instead of looking for one")
    parser.add_argument("script", metavar="SCRIPT", help="sdxl_train_network.py, sdxl_train.py, ...")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's own arguments")


def run(arguments: argparse.Namespace) -> int:
    """Look and say; leave with exit code 2 when the run would fail."""
    checkout = find_or_fetch(arguments.sd_scripts, "--sd-scripts", arguments.script)
    script = checkout.script(arguments.script)
    if not is_training_script(script):
        raise UserError(f"{script.name} is not a training script: there is nothing to check")
    resolved = read_arguments(script.name, arguments.arguments, os.environ)
    final: list[argparse.Namespace] = []
    sys.argv = [str(script), *arguments.arguments]
    with importable(checkout):
        parser = script_parser(checkout, script)
        take_over(parser, resolved, final.append)
        # The script's own reading of the config file, on top of which the command line is read once more.
        library: Any = sys.modules.get("library.args") or sys.modules["library.train_util"]
        library.read_config_from_file(parser.parse_args(), parser)
        found = preflight.inspect(script, final[-1], resolved.settings)
    preflight.say(found, resolved.settings.strict)
    note(f"{script.name} can start: nothing was found that would stop it")
    return 0
