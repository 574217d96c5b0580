"""Names of a run's models and states in its output folder: upstream's and the extension's.

An output name may contain folders (``--output_name cats/tabby``), because upstream joins it to the output folder. On Windows
and macOS ``Cat`` and ``cat`` are one name: names are compared as the file system of the folder does.
"""

from __future__ import annotations

import os
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


def is_same_path(path: str, other: str) -> bool:
    """Return whether two absolute paths are one file or folder, as the file system compares them, or two texts are equal."""
    if os.path.normcase(path) == os.path.normcase(other):
        return True
    try:
        return os.path.isabs(path) and os.path.isabs(other) and os.path.samefile(path, other)
    except OSError:  # one of them does not exist
        return False


#: A number follows where an earlier state is open in another program, so that it cannot be replaced.
_STATE = r"-state(\.\d+)?"

_MODEL = r"\.(safetensors|ckpt|pt|bin)"


@dataclass(frozen=True)
class _Place:
    """Where a run's files are, and the start of their names."""

    folder: Path
    name: str
    """Empty without ``--output_name``; upstream then uses three names."""

    @classmethod
    def of(cls, folder: Path, name: str | None) -> _Place:
        """Return the place of an output name."""
        stem = folder / name if name else folder / "_"
        return cls(stem.parent, stem.name if name else "")

    def matching(self, rest: str) -> Iterator[Path]:
        """Yield the paths in the folder whose names are the start and a regular expression; nothing if it does not exist.

        A path whose name differs in case is yielded with the name that this run gives it, if that is the same file.
        """
        kind = (re.escape(self.name) or "(?:last|epoch|at)") + rest
        exact, similar = re.compile(kind), re.compile(kind, re.IGNORECASE)
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if exact.fullmatch(path.name):
                yield path
            elif similar.fullmatch(path.name):
                own = path.with_name(self.name + path.name[len(self.name) :].lower())
                if _is_same(own, path):
                    yield own


def _is_same(own: Path, other: Path) -> bool:
    """Return whether two names of a folder are one file. A link is not the same as its target."""
    try:
        return os.path.samestat(own.lstat(), other.lstat())
    except OSError:  # no file of that name
        return False


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


def is_state(path: Path) -> bool:
    """Return whether a run's file or folder is a state by its name."""
    return re.search(f"{_STATE}$", path.name) is not None


def previous_states(folder: Path, name: str | None) -> Iterator[Path]:
    """Yield the folders of an earlier run's states, renamed to ``NAME.previous``."""
    return _states(folder, name, ".previous")


def _states(folder: Path, name: str | None, suffix: str) -> Iterator[Path]:
    rest = rf"(-\d{{6}}|-step\d{{8}}|-{ROLLING}\d{{8}})?{_STATE}{re.escape(suffix)}"
    return (path for path in _Place.of(folder, name).matching(rest) if path.is_dir())


def temporary_paths(folder: Path, name: str | None, suffix: str) -> list[Path]:
    """Return temporary files and folders of a run's models and states, which end in ``suffix``."""
    rest = rf"(-\d{{6}}|(-step|{BEST}|-{ROLLING})\d{{8}})?(-state|(-ema)?(\.\w+)?)\.\w+(-\d+)+{re.escape(suffix)}"
    return [*_Place.of(folder, name).matching(rest)]


def _models(place: _Place, names: str) -> Iterator[Path]:
    yield from (path for path in place.matching(names + _MODEL) if not path.is_dir())
    yield from (path for path in place.matching(names) if path.is_dir())
