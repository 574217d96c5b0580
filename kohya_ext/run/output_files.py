"""Names of a run's models and states in its output folder: upstream's and the extension's.

An output name may contain folders (``--output_name cats/tabby``), because upstream joins it to the output folder.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROLLING = "rolling"
"""Precedes the step in the names of the states of --save_state_every_n_minutes."""

BEST = "-best-step"
"""Precedes the step in the name of the best model of --early_stopping."""

MULTIPLIER = "-multiplier-"
"""Precedes the multiplier in the names of the samples of --sample_multipliers."""

DEFAULT_NAME = "last"
"""Upstream's name for the final model without --output_name."""


def output_name(args: Namespace) -> str:
    """Return the name of a run's final model, which also begins the names of the extension's files."""
    return getattr(args, "output_name", None) or DEFAULT_NAME


_MODEL = r"\.(safetensors|ckpt|pt|bin)"


@dataclass(frozen=True)
class _Place:
    """Where a run's files are, and the regular expression for the start of their names."""

    folder: Path
    prefix: str

    @classmethod
    def of(cls, folder: Path, name: str | None) -> _Place:
        """Return the place of an output name. Without ``--output_name`` upstream uses three names."""
        if not name:
            return cls(folder, "(?:last|epoch|at)")
        stem = folder / name
        return cls(stem.parent, re.escape(stem.name))

    def paths(self) -> Iterator[Path]:
        """Yield everything in the folder; nothing if there is none."""
        return self.folder.iterdir() if self.folder.is_dir() else iter(())


def models(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield a run's models, including those of single epochs and steps and EMA weights. Diffusers models are folders."""
    return _models(_Place.of(folder, name), rf"(-\d{{6}}|(-step|{BEST})\d{{8}})?(-ema)?")


def final_models(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield the models that are written at the end of a run."""
    return _models(_Place.of(folder, name), "(-ema)?")


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
    place = _Place.of(folder, name)
    kind = re.compile(rf"{place.prefix}(-\d{{6}}|-step\d{{8}}|-{ROLLING}\d{{8}})?-state{re.escape(suffix)}")
    return (path for path in place.paths() if kind.fullmatch(path.name) and path.is_dir())


def temporary_paths(folder: Path, name: str | None, suffix: str) -> list[Path]:
    """Return temporary files and folders of a run's models and states, which end in ``suffix``."""
    place = _Place.of(folder, name)
    kind = rf"{place.prefix}(-\d{{6}}|(-step|{BEST}|-{ROLLING})\d{{8}})?(-state|(-ema)?(\.\w+)?)\.\w+(-\d+)+{re.escape(suffix)}"
    return [path for path in place.paths() if re.fullmatch(kind, path.name)]


def _models(place: _Place, names: str) -> Iterator[Path]:
    as_file, as_folder = re.compile(place.prefix + names + _MODEL), re.compile(place.prefix + names)
    return (path for path in place.paths() if (as_folder if path.is_dir() else as_file).fullmatch(path.name))
