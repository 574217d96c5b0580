"""Check the output folder: it is writable, has enough free space, and holds no earlier model of that name."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import Namespace
from pathlib import Path

from kohya_ext.config.settings import Settings
from kohya_ext.errors import UserError
from kohya_ext.preflight import Findings, given, sizes
from kohya_ext.preflight.sizes import Size
from kohya_ext.renames import unlink
from kohya_ext.run import output_lock
from kohya_ext.run.atomic_write import previous
from kohya_ext.run.output_files import DEFAULT_NAME, final_models

#: Longest file name on common file systems, in bytes.
_MAX_NAME = 255

#: Longest suffix that a run appends to its output name.
_LONGEST_SUFFIX = "-step00000000-ema.safetensors.partial"

_INVALID_ON_WINDOWS = '<>:"|?*' + "".join(map(chr, range(32)))

#: Devices of Windows, whatever follows a dot: a model of the name "nul" would be written to nowhere.
_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}

#: Longest path of Windows, unless long paths are enabled.
_MAX_PATH = 259

#: The longest that a run appends to its output name: a file that is being written, in a state that is being written.
_LONGEST_PATH = (
    "-step00000000-state.computer-name-00-000000-000.partial/random_states_0.pkl.computer-name-00-000000-000.partial"
)


def check(script: Path, args: Namespace, findings: Findings, settings: Settings) -> None:
    """Check the output folder. Creates the folder, with that for samples, and changes nothing else."""
    if not getattr(args, "output_dir", None):
        findings.errors.append("no output folder: --output_dir is required")
        return
    folder, name = Path(args.output_dir), getattr(args, "output_name", None)
    if name == "":  # of a GUI's empty field; upstream only replaces a missing name
        findings.errors.append("--output_name is empty, so the model's file would be .safetensors; give a name, or remove it")
        return
    if name and (problem := name_problem(folder, name)) is not None:
        findings.errors.append(f"--output_name {_abbreviated(name)} {problem}")
        return
    if (problem := _long_path_problem(folder, name or DEFAULT_NAME)) is not None:
        findings.errors.append(problem)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if name and any(given(args, "sample_every_n_steps", "sample_every_n_epochs", "sample_at_first")):
            (folder / "sample" / name).parent.mkdir(parents=True, exist_ok=True)  # upstream does not create folders in a name
        try_to_write(folder)
    except OSError as error:
        # Windows creates such a folder without the space, and does not find it with the space.
        hint = next((f"; {part!r} ends with a space" for part in folder.parts if part != part.rstrip()), "")
        findings.errors.append(f"--output_dir {folder} cannot be written to: {error.strerror or error}{hint}")
        return
    if (problem := _logging_problem(args)) is not None:
        findings.errors.append(problem)
    try:
        if (owner := output_lock.other_owner(args)) is not None:
            findings.errors.append(output_lock.conflict_message(args, owner))
    except UserError as refused:
        findings.errors.append(str(refused))
    _check_earlier(folder, name, findings, settings)
    size = sizes.predict(script, args)
    if size is not None:
        _check_free_space(args, folder, size, findings, settings)


def try_to_write(folder: Path) -> None:
    """Create a file in a folder and remove it. Raises OSError.

    Not with tempfile: where Windows denies it, Python before 3.13 tries other names for hours (python/cpython#66305).
    """
    file = folder / f".kohya_ext.{os.getpid()}.tmp"
    os.close(os.open(file, os.O_CREAT | os.O_WRONLY))
    unlink(file)


def _logging_problem(args: Namespace) -> str | None:
    """Return why trackers cannot write to --logging_dir, which would end the run after the model has loaded."""
    name = getattr(args, "logging_dir", None)
    if not name:
        return None
    nearest = next(path for path in (Path(name).absolute(), *Path(name).absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"--logging_dir {name} cannot be a folder: {nearest} is a file"
    return None if os.access(nearest, os.W_OK) else f"--logging_dir {name} cannot be written to"


def name_problem(folder: Path, name: str) -> str | None:
    """Return why files cannot have an output name, and a remedy; None when they can."""
    last = Path(name).name
    invalid = "".join(character for character in _INVALID_ON_WINDOWS if character in last) if os.name == "nt" else ""
    if invalid:
        return f"contains {invalid}, which Windows does not allow in file names; use another name"
    if os.name == "nt" and last.partition(".")[0].rstrip().lower() in _DEVICES:
        return "is the name of a device in Windows, not of a file; use another name"
    longest = _MAX_NAME - len(_LONGEST_SUFFIX)
    if len(last.encode()) > longest:
        return f"is too long for a file name; use at most {longest} bytes"
    if not last or (last != name and not (folder / name).parent.is_dir()):
        return "is a path in a folder that does not exist; give the folder as --output_dir"
    return None


def _long_path_problem(folder: Path, name: str) -> str | None:
    """Return why Windows would not open the files of a run, and a remedy; None if it does."""
    length = len(os.path.abspath(folder / name)) + len(_LONGEST_PATH)
    if length <= _MAX_PATH or _allows_long_paths():
        return None
    return (
        f"--output_dir {_abbreviated(str(folder))} is too long: a run writes paths of up to {length} characters, and Windows "
        f"allows {_MAX_PATH}. Use a folder with a shorter path, or enable long paths: "
        "https://learn.microsoft.com/windows/win32/fileio/maximum-file-path-limitation"
    )


def _allows_long_paths() -> bool:
    if sys.platform != "win32":
        return True
    import ctypes

    enabled = getattr(ctypes.WinDLL("ntdll"), "RtlAreLongPathsEnabled", None)  # since Windows 10
    return enabled is None or bool(enabled() & 0xFF)  # a BOOLEAN of one byte


def _abbreviated(name: str) -> str:
    """Return a name for a message; cut the middle of a long one."""
    return name if len(name) <= 60 else f"{name[:40]}...{name[-10:]}"


def _check_free_space(args: Namespace, folder: Path, size: Size, findings: Findings, settings: Settings) -> None:
    """Add an error when one model does not fit on the disk, or a warning when all files of the run do not."""
    free = shutil.disk_usage(folder).free
    if free < size.model:
        findings.errors.append(
            f"not enough disk space in {folder}: the model takes about {_format(size.model)}, and {_format(free)} is free"
        )
        return
    models, states = 1 + _saves(args, ""), 0
    if getattr(args, "save_state", False):
        states = _saves(args, "_state") + 1
    elif getattr(args, "save_state_on_train_end", False):
        states = 1
    if settings["save_state_every_n_minutes"] is not None:
        states += settings["save_last_n_timed_states"] + 1  # an old one is removed after the new one is complete
    ema = 4 * size.trained if settings["ema"] else 0
    needed = models * size.model * (2 if settings["ema"] else 1) + states * (size.state + ema)
    if free < needed:
        findings.warnings.append(
            f"saves will need about {_format(needed)} ({models} models of {_format(size.model)}, {states} states of at least "
            f"{_format(size.state)}), but {folder} has {_format(free)} free; save less often or use --save_last_n_steps"
        )


def _saves(args: Namespace, kind: str) -> int:
    """Return the number of models, or states, of single epochs and steps that are kept, as far as known in advance."""
    kept = 0
    for unit, total in (("steps", "max_train_steps"), ("epochs", "max_train_epochs")):
        every, last = getattr(args, f"save_every_n_{unit}", None), getattr(args, f"save_last_n_{unit}", None)
        if kind:
            last = getattr(args, f"save_last_n_{unit}_state", None) or last
        if every and getattr(args, total, None):
            saves = max(getattr(args, total) - 1, 0) // every
            kept += min(saves, last // every + 1) if last else saves
    return kept


def _format(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _check_earlier(folder: Path, name: str | None, findings: Findings, settings: Settings) -> None:
    for earlier in final_models(folder, name):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier.stat().st_mtime))
        if not settings["keep_previous"]:
            findings.warnings.append(f"{earlier} of {when} will be replaced at the end")
            continue
        backup = previous(earlier)
        replaced = f", replacing the existing {backup.name}" if backup.exists() else ""
        findings.warnings.append(f"{earlier} of {when} will be renamed to {backup.name}{replaced}")
