"""Where the result goes: a folder that can be written, with room, and nothing of that name in it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from kohya_ext.config.settings import Settings
from kohya_ext.preflight import Findings, sizes
from kohya_ext.preflight.sizes import Size
from kohya_ext.run import output_lock
from kohya_ext.run.atomic_write import previous
from kohya_ext.run.output_files import final_models

#: Bytes in a file's name, on all usual file systems.
_LONGEST_NAME = 255

#: The longest ending that a run gives to its output name.
_LONGEST_ENDING = "-step00000000-ema.safetensors.partial"

_NOT_ON_WINDOWS = '<>:"|?*'


def check(script: Path, args: Namespace, findings: Findings, settings: Settings) -> None:
    """Check the output folder. Changes nothing but this: it makes the folder."""
    if not getattr(args, "output_dir", None):
        findings.errors.append("no --output_dir: the trained model would have nowhere to go")
        return
    folder, name = Path(args.output_dir), getattr(args, "output_name", None)
    if name and (problem := name_problem(folder, name)) is not None:
        findings.errors.append(f"--output_name {_shortened(name)} {problem}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        findings.errors.append(f"--output_dir {folder} cannot be written to: {error.strerror or error}")
        return
    if (owner := output_lock.other_run(args)) is not None:
        findings.errors.append(output_lock.in_use(args, owner))
    _check_older(folder, name, findings, settings)
    size = sizes.check(script, args)
    if size is not None:
        _check_room(args, folder, size, findings, settings)


def name_problem(folder: Path, name: str) -> str | None:
    """Return what is wrong with an output name, and what to give instead; None when files can have it."""
    last = Path(name).name
    wrong = "".join(letter for letter in _NOT_ON_WINDOWS if letter in last) if os.name == "nt" else ""
    if wrong:
        return f"has {wrong} in it, which no file name on Windows can have: give another name"
    longest = _LONGEST_NAME - len(_LONGEST_ENDING)
    if len(last.encode()) > longest:
        return f"is too long for the names of files: give one of {longest} bytes at most"
    if not last or (last != name and not (folder / name).parent.is_dir()):
        return "is not a name but a path, and its folder does not exist: give the folder as --output_dir"
    return None


def _shortened(name: str) -> str:
    """Return a name for a message, its middle left out where it is long."""
    return name if len(name) <= 60 else f"{name[:40]}...{name[-10:]}"


def _check_room(args: Namespace, folder: Path, size: Size, findings: Findings, settings: Settings) -> None:
    """An error when not even one model fits, a warning when all that will be kept does not."""
    free = shutil.disk_usage(folder).free
    if free < size.model:
        findings.errors.append(
            f"there is no room for the model in {folder}: it takes about {_size(size.model)}, {_size(free)} is free"
        )
        return
    models, states = 1 + _saves(args, ""), 0
    if getattr(args, "save_state", False):
        states = _saves(args, "_state") + 1
    elif getattr(args, "save_state_on_train_end", False):
        states = 1
    if settings["save_state_every_n_minutes"] is not None:
        states += settings["save_last_n_timed_states"] + 1  # a new one is whole before an old one goes
    average = 4 * size.trained if settings["ema"] else 0
    needed = models * size.model * (2 if settings["ema"] else 1) + states * (size.state + average)
    if free < needed:
        findings.warnings.append(
            f"what will be kept takes about {_size(needed)} ({models} models of {_size(size.model)}, {states} states of at "
            f"least {_size(size.state)}), and {_size(free)} is free in {folder}: save more seldom, or see --save_last_n_steps"
        )


def _saves(args: Namespace, kind: str) -> int:
    """How many models, or states, of single epochs and steps are kept; what is not known before the data is read is not
    counted.
    """
    kept = 0
    for unit, total in (("steps", "max_train_steps"), ("epochs", "max_train_epochs")):
        every, last = getattr(args, f"save_every_n_{unit}", None), getattr(args, f"save_last_n_{unit}", None)
        if kind:
            last = getattr(args, f"save_last_n_{unit}_state", None) or last
        if every and getattr(args, total, None):
            its = max(getattr(args, total) - 1, 0) // every
            kept += min(its, last // every + 1) if last else its
    return kept


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _check_older(folder: Path, name: str | None, findings: Findings, settings: Settings) -> None:
    for older in final_models(folder, name):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(older.stat().st_mtime))
        if not settings["keep_previous"]:
            findings.warnings.append(f"{older} of {when} is there and will be replaced at the end")
            continue
        kept = previous(older)
        again = f", in the place of the {kept.name} that is there" if kept.exists() else ""
        findings.warnings.append(f"{older} of {when} is there: when the new one is saved, it becomes {kept.name}{again}")
