"""What can be known to go wrong before a model is loaded, said all at once.

Upstream finds these out one by one, minutes into the run, without a file's name, or never. Only the script's own final
arguments are looked at, and files: their headers and ends, not their contents.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kohya_ext.config.settings import Settings
from kohya_ext.console import note, stop, warn
from kohya_ext.run import step_times


@dataclass
class Findings:
    """What the preflight found. Each entry is one line."""

    errors: list[str] = field(default_factory=list)
    """The run would fail, or train something else than what was asked for."""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: int | None = None
    """How many steps the run makes; None when that cannot be told."""


def inspect(script: Path, args: Namespace, settings: Settings) -> Findings:
    """Look at a training script's final arguments. Changes nothing but this: it makes the output folder."""
    from kohya_ext.preflight import data, models, options, output

    findings = Findings()
    if getattr(args, "debug_dataset", False):
        return findings
    checks: dict[str, Callable[[Path, Namespace, Findings], None]] = {
        "arguments": options.check,
        "model files": partial(models.check, settings=settings),
        "training set": data.check,
        "output folder": partial(output.check, settings=settings),
    }
    for what, check in checks.items():
        try:
            check(script, args, findings)
        except Exception as error:  # a check that fails must not take the training down with it
            findings.warnings.append(f"the check of the {what} could not finish: {type(error).__name__}: {error}")
    _note_time(script, args, settings, findings)
    return findings


def _note_time(script: Path, args: Namespace, settings: Settings, findings: Findings) -> None:
    key = step_times.cache_key(script, args, settings)
    step_times.set_current_key(key)
    if findings.steps is not None and (measured := step_times.load(key)) is not None:
        seconds, day = measured
        expected = step_times.format_duration(seconds * findings.steps)
        findings.notes.append(f"about {expected} of training: a step with these settings took {seconds:.3g} s on {day}")


def say(findings: Findings, strict: bool | None) -> None:
    """Print the findings; leave with exit code 2 when there is an error, or under ``strict`` a warning."""
    for line in findings.notes:
        note(line)
    errors = findings.errors + (findings.warnings if strict else [])
    for line in [] if strict else findings.warnings:
        warn(line)
    if errors:
        stop("\n".join([*errors, "nothing was loaded or trained; --no-preflight skips these checks"]))


def shortened(names: list[str], most: int = 5) -> str:
    """The first few of a list of names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def given(args: Namespace, *names: str) -> Iterator[str]:
    """Yield those of some arguments that are set to something other than None, False, 0 or nothing."""
    return (name for name in names if getattr(args, name, None))
