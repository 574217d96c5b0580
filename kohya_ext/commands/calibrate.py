"""Measure this machine's GPU, so that predicted seconds fit it.

Takes less than a minute.
"""

from __future__ import annotations

import argparse
import json

from kohya_ext.console import note, progress
from kohya_ext.errors import UserError
from kohya_ext.estimate import machine
from kohya_ext.installed_gpus import first_gpu


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes, operations and microseconds")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("no NVIDIA GPU found; run `calibrate` on the machine that trains")
    from kohya_ext.gpu import calibration

    with progress("measuring the GPU (less than a minute)"):
        measured = calibration.measure()
    first = first_gpu()
    name = first.name if first is not None else torch.cuda.get_device_name(0)
    try:
        file = machine.keep_measured(name, measured)
    except OSError as error:
        raise UserError(f"the measurement cannot be written: {error}; set KOHYA_EXT_CACHE to a writable folder") from None
    if arguments.json:
        print(json.dumps({"gpu": name, **measured}, indent=1))
        return 0
    for line in (f"{name}:", *calibration.lines(measured)):
        print(line)
    note(f"`estimate` and `plan` use it from now on ({file})")
    return 0
