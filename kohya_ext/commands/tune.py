"""Measure a training command and other configurations on this GPU.

Takes the command line of the training, and trains nothing: each configuration runs some steps in a process of its own, on your
models and data, and writes no files of the run. Ctrl-C ends it and keeps what was measured. The result is a table, the
command to type, and measurements that `plan` and --preset auto use from then on.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from kohya_ext.config import training_command
from kohya_ext.config.command_line import CommandLine, launcher_options, quoted
from kohya_ext.console import note, warn
from kohya_ext.errors import UserError
from kohya_ext.estimate import step_time, tuned
from kohya_ext.estimate.tuned import Tuned
from kohya_ext.installed_gpus import driver_version
from kohya_ext.kernels.triton_package import mismatched_triton
from kohya_ext.output import Console
from kohya_ext.planning import automatic
from kohya_ext.renames import replace_text
from kohya_ext.speed import proof, verdicts
from kohya_ext.tuning import cards
from kohya_ext.tuning.child import CommandError
from kohya_ext.tuning.rows import Row
from kohya_ext.tuning.tuner import Tuner
from kohya_ext.units import gigabytes

_MINUTES = 10.0

#: The exit code after Ctrl-C.
_STOPPED = 130


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    training_command.configure(parser, "its arguments, as for training", _add_own, is_optional=True)


def _add_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        default=argparse.SUPPRESS,
        help=f"start no measurement after this time; default: {_MINUTES:.0f}",
    )
    parser.add_argument(
        "--self_test",
        "--self-test",
        action="store_true",
        default=argparse.SUPPRESS,
        help="repeat the self-test of the GPU, as runs do the first time, and let runs choose again what --speed turns on",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="write what was measured on this GPU as JSON without names, paths or captions, also without SCRIPT (docs/tune.md)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    own = vars(arguments)
    if arguments.script is not None:
        return _tune(training_command.read(arguments, automatic, "nothing to tune", _add_own))
    if own.get("self_test"):
        return _test_again()
    if "export" in own:
        _require_gpu()
        _export(own["export"], tuned.load(tuned.machine(_gpu()["name"])))
        return 0
    raise UserError("nothing to measure; give a training script and its arguments, or --self_test")


def _gpu() -> dict[str, Any]:
    """Return the GPU as an exported file describes it."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    return {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": capability,
        "driver": driver_version(),
    }


def _export(file: Path, runs: Sequence[Tuned]) -> None:
    """Write the runs of this GPU to a file. Raises UserError if there is none, or if it cannot be written."""
    if not runs:
        raise UserError("nothing was measured on this GPU with this driver and these packages; run tune SCRIPT ... first")
    gpu = _gpu()
    versions = {name: text for name, text in tuned.machine(gpu["name"]).items() if name in tuned.PACKAGES}
    versions = {"python": platform.python_version(), **versions}
    document = cards.document(gpu, cards.this_machine(), versions, runs)
    if problems := cards.problems(document):
        raise UserError("\n".join(["the export is left out, because it may be private or wrong:", *problems]))
    try:
        replace_text(file, json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"the export cannot be written: {error}") from None
    note(f"{file}: {len(runs)} runs; docs/tune.md says where to send it")


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("no NVIDIA GPU found; run it on the machine that trains")


def _test_again() -> int:
    """Repeat the self-test, and forget what trials have chosen; return 1 if a feature failed."""
    _require_gpu()
    machine = proof.machine(0)
    proof.file_of(machine).unlink(missing_ok=True)
    verdicts.forget()
    problems = proof.problems(machine, proof.FEATURES, proof.starter(0), note)
    for name, title in proof.FEATURES.items():
        print(f"{title}: {problems[name] or 'right'}")
    return int(any(problems.values()))


def _tune(request: training_command.Question) -> int:
    """Measure; return 1 if nothing could be measured."""
    _require_gpu()
    processes = launcher_options(request.command.words)[0].get("num_processes") or 1
    if processes > 1:
        raise UserError("tune measures one GPU; leave out --num_processes")
    minutes = float(request.own.get("minutes", _MINUTES))
    if not 0 < minutes <= 24 * 60:
        raise UserError(f"--minutes {minutes:g}: must be positive, and a day at most")
    # A preset from the environment would be missing in the printed command line.
    command = request.command.with_environment()
    command = replace(command, environ={name: value for name, value in command.environ.items() if name != "KOHYA_EXT_PRESET"})
    if (mismatch := mismatched_triton()) is not None:
        warn(mismatch)
    tuner = Tuner(request.checkout, command, 60 * minutes, note)
    try:
        tuner.run()
    except CommandError as error:
        raise UserError(str(error)) from None
    try:
        tuner.keep()
    except OSError as error:
        warn(f"the measurements cannot be kept: {error}; set KOHYA_EXT_CACHE to a writable folder")
    _show(Console(), tuner)
    if "export" in request.own:
        _export(request.own["export"], tuner.all_runs())
    if tuner.is_stopped:
        return _STOPPED
    return int(tuner.best is None)


def _show(console: Console, tuner: Tuner) -> None:
    upstream = next((row for row in tuner.rows if row.kind == "upstream"), None)
    table = Table("configuration", "per image", "speed", "reserved", "on the GPU", "waiting", "predicted")
    for row in sorted(tuner.rows, key=lambda row: ("upstream", "typed", "candidate").index(row.kind)):
        if row.measured is not None:
            table.add_row(row.name, *_cells(row, upstream))
    console.print(table)
    for judgement in tuner.judgements:
        for line in judgement.lines():
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    best = tuner.best
    if best is None:
        console.print("Nothing could be measured.", highlight=False)
        return
    console.print(f"Fastest: {best.name}. To run it:", highlight=False, soft_wrap=True, markup=False)
    print(f"  {quoted(_words(best.command))}")


def _cells(row: Row, upstream: Row | None) -> Sequence[str]:
    """Return the cells of a measured row after its name."""
    measured = row.measured
    assert measured is not None
    predicted = "" if row.predicted is None else step_time.format_seconds(row.predicted)
    if measured.failed:
        return measured.failed, "", "", "", "", predicted
    reference = upstream.measured if upstream is not None else None
    speed = f"{reference.seconds / measured.seconds:.2f}x" if reference is not None and reference.seconds else ""
    return (
        f"{step_time.format_seconds(measured.seconds)} \u00b1 {measured.spread / 2:.2g}",
        speed,
        f"{gigabytes(measured.reserved)} GB",
        f"{gigabytes(measured.on_card)} GB",
        "" if measured.waiting is None else f"{measured.waiting:.0%}",
        predicted,
    )


def _words(command: CommandLine) -> list[str]:
    return ["python", "-m", "kohya_ext", command.name, *command.argv]
