"""Check arguments, data, models and output folder without training.

Every run starts with the same checks. Takes as long as the script's imports. With --images every image and caption is looked
at, and remarks on them are a page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kohya_ext import preflight
from kohya_ext.config import training_command
from kohya_ext.config.arguments import take_over
from kohya_ext.console import note, progress
from kohya_ext.errors import UserError
from kohya_ext.launch.session import warn_if_too_large
from kohya_ext.planning import automatic
from kohya_ext.renames import replace_text
from kohya_ext.sdscripts.introspect import importable, script_parser


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "the script's own arguments", _add_own)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--images",
        action="store_true",
        default=argparse.SUPPRESS,
        help="look at every image and caption: duplicates, blur, compression, bars, marks, ...; write a page of remarks",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the checks; exit with code 2 if the run would fail."""
    request = training_command.read(arguments, automatic, "there is nothing to check", _add_own)
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
    if request.own.get("images"):
        _review(script, final[-1])
    preflight.report(findings, command.settings.strict)
    warn_if_too_large(checkout, final[-1], command)
    count = len(findings.warnings)
    passed = f"{count} warning{'s' * (count > 1)}" if count else "all checks passed"
    note(f"{script.name} can start; {passed}")
    return 0


def _review(script: Path, args: argparse.Namespace) -> None:
    """Print the remarks on images and captions, and write their page into the output folder. Raises UserError."""
    from kohya_ext.data_review import page, review

    counted = "looking at the images"

    def show(done: int, total: int) -> None:
        nonlocal counted
        counted = f"looking at the images: {done} of {total}"

    with progress(lambda: counted):
        reviewed = review.of(script, args, show)
    name = getattr(args, "output_name", None) or "last"
    file = Path(getattr(args, "output_dir", None) or ".") / f"{name}.images.html"
    for folder, kind, details in reviewed.folders:
        note(f"{folder}: {review.KINDS[kind][0]}: {details}")
    for kind, count in reviewed.counts.items():
        title, remedy = review.KINDS[kind]
        note(f"{count} x {title}: {remedy}")
    try:
        replace_text(file, page.html(reviewed, name))
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error}") from None
    note(f"{reviewed.score:.0%} of {len(reviewed.images)} images have no remark; the others, worst first: {file.resolve()}")
