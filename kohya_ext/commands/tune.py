"""Test what makes runs faster on this machine's GPU.

In a process of its own, as runs do by themselves the first time. What trials have chosen is forgotten, so runs choose again.
"""

from __future__ import annotations

import argparse

from kohya_ext.console import note
from kohya_ext.errors import UserError
from kohya_ext.speed import proof, switches, verdicts


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
    verdicts.forget()
    problems = proof.problems(machine, [switch.name for switch in switches.ALL], proof.starter(0), note)
    for switch in switches.ALL:
        print(f"{switch.title}: {problems[switch.name] or 'right'}")
    return int(any(problems.values()))
