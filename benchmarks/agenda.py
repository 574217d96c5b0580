"""``python -m benchmarks.agenda``: the suites for a short visit to a GPU, the most valuable first, resumable.

Each call does what it can in its minutes and ends in time; the next one goes on. A job is done when its JSON says that it is
complete, so results brought back to ``--results`` are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT
from benchmarks.results import read
from benchmarks.vram_calibration import CASES
from kohya_ext.console import note

#: A job is not begun with less than this left: it would end before its first round.
LEAST_SECONDS = 60


@dataclass(frozen=True)
class Job:
    """One call of ``benchmarks.run``, or of the calibration."""

    name: str
    arguments: tuple[str, ...] = ()


#: The estimates against a card: a module of its own, which keeps its own file and goes on where it was cut off.
CALIBRATION = Job("vram_calibration")


def _step(family: str, variants: str, *more: str, suite: str = "step") -> tuple[str, ...]:
    return (suite, "--family", family, "--variants", variants, *(("--", *more) if more else ()))


#: In the order of what a reader wants to know. Every one fits into ten minutes on a card of 80 GB or more.
GPU = (
    Job("sdxl-lora-step", _step("sdxl-lora", "upstream,patched,fused,compiled,upstream-free,compiled-free")),
    Job("sdxl-lora-budget", _step("sdxl-lora", "upstream,budget-0.75,budget-0.5,budget-0.25,budget-0", suite="budget")),
    Job("sdxl-lora-shares", _step("sdxl-lora", "upstream,share-0.5,compiled-share-0.75,compiled-share-0.5", suite="budget")),
    Job("sdxl-lora-b4", _step("sdxl-lora", "upstream,compiled,budget-0.5", "--train_batch_size", "4")),
    Job("sdxl-lora-script", ("script", "--family", "sdxl-lora")),
    Job("lumina-lora-b6", _step("lumina-lora", "upstream,compiled,upstream-compile", "--train_batch_size", "6")),
    Job("lumina-lora-b2", _step("lumina-lora", "upstream,budget-0.5,upstream-free,compiled-free", "--train_batch_size", "2")),
    Job("sdxl-finetune-step", _step("sdxl-finetune", "upstream,compiled,compiled-free")),
    Job("sdxl-lora-vram", _step("sdxl-lora", "patched,vram-8GiB,vram-12GiB,vram-16GiB,vram-24GiB", suite="script")),
    Job("sdxl-lora-vram-compiled", _step("sdxl-lora", "compiled,compiled-vram-12GiB,compiled-vram-16GiB", suite="script")),
    Job("sdxl-lora-tiers", ("tiers", "--family", "sdxl-lora")),
    Job("sdxl-finetune-tiers", ("tiers", "--family", "sdxl-finetune")),
    CALIBRATION,
    Job("flux-lora-step", _step("flux-lora", "upstream,fused,compiled,budget-0.5")),
    Job("sdxl-lora-compile", ("compile", "--family", "sdxl-lora")),
    Job("sdxl-lora-overhead", ("overhead", "--family", "sdxl-lora")),
    Job("sdxl-lora-peers", _step("sdxl-lora", "upstream,compiled,upstream-compile,upstream-diffusers")),
)

#: The same ways through the code, small: what proves a bundle on a machine without a GPU.
CPU = (
    Job("sdxl-lora-step-cpu", ("step", "--variants", "upstream,patched", "--rounds", "2", "--steps", "3")),
    Job("sdxl-lora-script-cpu", ("script", "--variants", "upstream,patched", "--rounds", "1", "--steps", "2")),
    Job("sdxl-lora-tiers-cpu", ("tiers", "--steps", "2")),
)


def is_done(job: Job, results: Path) -> bool:
    """Return whether a job's result is there and complete."""
    try:
        if job is CALIBRATION:
            return set(CASES) <= set(json.loads((results / f"{job.name}.json").read_text(encoding="utf-8"))["rows"])
        return read(results / f"{job.name}.json").complete
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_jobs(jobs: Sequence[Job], results: Path, only: Sequence[str]) -> list[Job]:
    """Return what is to be done: those never begun first, then those cut off."""
    chosen = [job for job in jobs if not is_done(job, results) and (not only or job.name in only)]
    return sorted(chosen, key=lambda job: (results / f"{job.name}.json").is_file())


def main(argv: Sequence[str] | None = None) -> int:
    """Do the open jobs; return 0 when all are done, 3 when there are more for another call."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agenda", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results", metavar="FOLDER", help="where the JSON files are kept"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="of this call, with everything")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", metavar="NAME,...", help="of the jobs that --list shows")
    parser.add_argument("--list", action="store_true", help="say which jobs there are, and which are done")
    parser.add_argument("--sd-scripts", type=Path, default=ROOT / "sd-scripts", metavar="FOLDER")
    given = parser.parse_args(argv)
    end = time.monotonic() + 60 * given.minutes
    jobs = GPU if given.device == "cuda" else CPU
    only = list(filter(None, given.only.split(",")))
    if given.list:
        for job in jobs:
            print(f"{'done' if is_done(job, given.results) else 'open'}  {job.name}: {' '.join(job.arguments)}")
        return 0
    for job in open_jobs(jobs, given.results, only):
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            break
        _do(job, given, left)
    return 3 if open_jobs(jobs, given.results, only) else 0


def _do(job: Job, given: argparse.Namespace, left: float) -> None:
    note(f"{job.name}: {left:.0f} s left")
    begun = time.monotonic()
    process = subprocess.Popen(command(job, given, left), start_new_session=True)
    try:
        process.wait(timeout=left)
    except subprocess.TimeoutExpired:
        note(f"{job.name}: the time is up; what it has measured is kept")
        _end(process)
    note(f"{job.name}: {time.monotonic() - begun:.0f} s")


def command(job: Job, given: argparse.Namespace, left: float) -> list[str]:
    """Return a job's command line, for ``left`` seconds."""
    common = ["--device", given.device, "--sd-scripts", str(given.sd_scripts)]
    common += ["--output", str(given.results.resolve() / f"{job.name}.json")]
    if job is CALIBRATION:
        return [sys.executable, "-m", "benchmarks.vram_calibration", *common]
    suite, *rest = job.arguments
    common += ["--scratch", str(given.results.resolve() / "scratch"), "--minutes", f"{0.85 * left / 60:.2f}"]
    return [sys.executable, "-m", "benchmarks.run", suite, *common, *rest]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a job and the workers it has started: they are one process group."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
