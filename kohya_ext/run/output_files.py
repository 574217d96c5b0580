"""Names of a run's models and states in its output folder: upstream's and the extension's."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

ROLLING = "rolling"
"""Precedes the step in the names of the states of --save_state_every_n_minutes."""

DEFAULT_NAME = "last"
"""Upstream's name for the final model without --output_name."""


def output_name(args: Namespace) -> str:
    """Return the name of a run's final model, which also begins the names of the extension's files."""
    return getattr(args, "output_name", None) or DEFAULT_NAME


_MODEL = r"\.(safetensors|ckpt|pt|bin)"


def _prefix(name: str | None) -> str:
    """Return the regular expression for the start of a run's file names. Without ``--output_name`` upstream uses three."""
    return re.escape(name) if name else "(?:last|epoch|at)"


def models(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield a run's models, including those of single epochs and steps and EMA weights. Diffusers models are folders."""
    return _matching(folder, rf"{_prefix(name)}(-\d{{6}}|-step\d{{8}})?(-ema)?", _MODEL)


def final_models(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield the models that are written at the end of a run."""
    return _matching(folder, rf"{_prefix(name)}(-ema)?", _MODEL)


def rolling_state(folder: Path, name: str | None, step: int) -> Path:
    """Return the folder of a timed state, or of a state saved after an out-of-memory error."""
    return folder / f"{name or DEFAULT_NAME}-{ROLLING}{step:08d}-state"


def states(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield the folders of a run's states."""
    return _states(folder, name, "")


def previous_states(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield the folders of an earlier run's states, renamed to ``NAME.previous``."""
    return _states(folder, name, ".previous")


def _states(folder: Path, name: str | None, suffix: str) -> Iterator[Path]:
    kind = re.compile(rf"{_prefix(name)}(-\d{{6}}|-step\d{{8}}|-{ROLLING}\d{{8}})?-state{re.escape(suffix)}")
    return (path for path in folder.glob(f"*-state{suffix}") if kind.fullmatch(path.name) and path.is_dir())


def temporary_paths(folder: Path, name: str | None, suffix: str) -> list[Path]:
    """Return temporary files and folders of a run's models and states, which end in ``suffix``."""
    kind = rf"{_prefix(name)}(-\d{{6}}|-(step|{ROLLING})\d{{8}})?(-state|(-ema)?(\.\w+)?)\.\w+(-\d+)+{re.escape(suffix)}"
    return [path for path in folder.iterdir() if re.fullmatch(kind, path.name)]


def _matching(folder: Path, names: str, file_suffix: str) -> Iterator[Path]:
    as_file, as_folder = re.compile(names + file_suffix), re.compile(names)
    for path in folder.iterdir() if folder.is_dir() else ():
        if (as_folder if path.is_dir() else as_file).fullmatch(path.name):
            yield path
