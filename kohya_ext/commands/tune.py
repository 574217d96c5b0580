"""Measure a training command on this GPU beside upstream and other configurations.

Takes the command line of the training, and trains nothing: each configuration runs some steps in a process of its own, on your
models and data, and writes no files of the run. Ctrl-C ends it and keeps what was measured. The result is a table, the
command to type, and measurements that `plan` and --preset auto use from then on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from kohya_ext.config import training_command
from kohya_ext.config.command_line import CommandLine, launcher_options, quoted
from kohya_ext.console import note, warn
from kohya_ext.errors import UserError
from kohya_ext.estimate import step_time
from kohya_ext.output import Console
from kohya_ext.planning import automatic
from kohya_ext.speed import proof, switches, verdicts
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


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    if arguments.script is not None:
        return _tune(training_command.read(arguments, automatic, "nothing to tune", _add_own))
    if vars(arguments).get("self_test"):
        return _test_again()
    raise UserError("nothing to measure; give a training script and its arguments, or --self_test")


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
    problems = proof.problems(machine, [switch.name for switch in switches.ALL], proof.starter(0), note)
    for switch in switches.ALL:
        print(f"{switch.title}: {problems[switch.name] or 'right'}")
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
        f"{measured.waiting:.0%}",
        predicted,
    )


def _words(command: CommandLine) -> list[str]:
    shown = command.with_({"preflight": None})
    return ["python", "-m", "kohya_ext", command.name, *shown.argv]
