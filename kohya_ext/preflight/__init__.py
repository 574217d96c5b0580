"""Check a run's arguments and files before a model is loaded, and report all problems together.

Upstream reports them one at a time, minutes into the run, without a file name, or never. The checks read the script's final
arguments, and only the headers and ends of files.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kohya_ext import installed_gpus
from kohya_ext.config.settings import Settings
from kohya_ext.console import note, printable, stop, warn
from kohya_ext.patching.patch import registry
from kohya_ext.run import step_times
from kohya_ext.units import has_gpu


@dataclass
class Findings:
    """The results of preflight, one line each."""

    errors: list[str] = field(default_factory=list)
    """Problems with which the run would fail, or train something other than requested."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int | None = None
    """Optimizer steps of the run; None when unknown."""


def inspect(script: Path, args: Namespace, settings: Settings) -> Findings:
    """Check a training script's final arguments. Creates the output folder and changes nothing else."""
    from kohya_ext.preflight import data, hub, models, options, output, packages

    findings = Findings()
    if getattr(args, "debug_dataset", False):
        return findings
    checks: dict[str, Callable[[Path, Namespace, Findings], None]] = {
        "packages": packages.check,
        "arguments": partial(options.check, settings=settings),
        "model files": partial(models.check, settings=settings),
        "Hugging Face Hub": hub.check,
        "training set": partial(data.check, settings=settings),
        "output folder": partial(output.check, settings=settings),
        "patches": partial(_check_patches, settings=settings),
    }
    for subject, check in checks.items():
        try:
            check(script, args, findings)
        except Exception as error:  # a bug in a check must not stop the run
            findings.warnings.append(f"the check of the {subject} failed: {type(error).__name__}: {error}")
    if "torch" in sys.modules and not has_gpu():  # a script has imported it
        _explain_cpu(findings)
    _add_duration(script, args, settings, findings)
    return findings


def _explain_cpu(findings: Findings) -> None:
    """Add why a run trains on the CPU. On Windows, pip installs PyTorch without CUDA."""
    import torch

    gpu = installed_gpus.first_gpu()
    if gpu is None:
        findings.notes.append("PyTorch finds no GPU: training on the CPU")
    elif torch.version.cuda is None:
        findings.warnings.append(
            f"PyTorch {torch.__version__} is a build without CUDA: training on the CPU, not on the {gpu.name}; install the "
            f"CUDA build for {sys.executable} with the command from https://pytorch.org/get-started/locally/"
        )
    else:
        findings.warnings.append(
            f"PyTorch cannot use the {gpu.name}: training on the CPU; install a driver for CUDA {torch.version.cuda} or newer"
        )


def _check_patches(script: Path, args: Namespace, findings: Findings, settings: Settings) -> None:
    """Add the problems that the wanted patches have with the run."""
    for patch in registry().values():
        if {"*", patch.name}.isdisjoint(settings.disable_patch) and patch.wanted(settings):
            findings.errors.extend(patch.problems(script.name, args, settings))


def _add_duration(script: Path, args: Namespace, settings: Settings, findings: Findings) -> None:
    key = step_times.cache_key(script, args, settings)
    step_times.set_current_key(key)
    if findings.steps is not None and (measured := step_times.load(key)) is not None:
        seconds, day = measured
        expected = step_times.format_duration(seconds * findings.steps)
        findings.notes.append(f"expected training time: {expected} ({seconds:.3g} s per step with these settings on {day})")


def report(findings: Findings, strict: bool | None) -> None:
    """Print the findings. Exits with code 2 on an error, or under ``strict`` on a warning."""
    for line in findings.notes:
        note(line)
    errors = findings.errors + (findings.warnings if strict else [])
    for line in [] if strict else findings.warnings:
        warn(line)
    if errors:
        stop("\n".join([*map(printable, errors), "nothing was loaded or trained; --no-preflight skips these checks"]))


def abbreviated(names: list[str], limit: int = 5) -> str:
    """Return the first few of a list of names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def given(args: Namespace, *names: str) -> Iterator[str]:
    """Yield the names of arguments whose values are not None, False, 0 or empty."""
    return (name for name in names if getattr(args, name, None))
