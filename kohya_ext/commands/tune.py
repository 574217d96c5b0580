"""Test what makes runs faster on this machine's GPU.

In a process of its own, as runs do by themselves the first time.
"""

from __future__ import annotations

import argparse

from kohya_ext.console import note, progress
from kohya_ext.errors import UserError
from kohya_ext.speed import proof, switches


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--self_test", "--self-test", action="store_true", required=True, help="repeat the self-test")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit code: 1 if a feature failed."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("no NVIDIA GPU found; run it on the machine that trains")
    machine = proof.machine(0)
    proof.file_of(machine).unlink(missing_ok=True)
    test = proof.SelfTest(machine, [switch.name for switch in switches.ALL], proof.starter(0), note)
    with progress(f"testing the {machine['gpu']} (up to {proof.LIMIT / 60:.0f} minutes)"):
        problems = {switch: test.problem(switch.name) for switch in switches.ALL}
    for switch, problem in problems.items():
        print(f"{switch.title}: {'right' if problem is None else problem}")
    return int(any(problem is not None for problem in problems.values()))
