"""Which run a saved state belongs to, and which files it consists of: one JSON file in every state.

Written last, so a state that has it was saved to the end. It is read without torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

FILE = "kohya_ext_run.json"
"""The file in a state's folder."""

#: The arguments that tell one run from another of the same name. What may change when a run is resumed (steps, learning
#: rate, batch size, memory savings) is not among them.
_IDENTITY = (
    *("pretrained_model_name_or_path", "train_data_dir", "reg_data_dir", "in_json", "dataset_config"),
    *("network_module", "network_dim", "seed"),
)


@dataclass(frozen=True)
class RunRecord:
    """One training run, across its resumes."""

    script: str
    """The script's file name."""
    identity: Mapping[str, str]
    """What tells this run from others, by argument; arguments that were not given are left out."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The same in every state of a run, and in those of the runs that resume it."""
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    """When its first process started, local time."""
    command: tuple[str, ...] = ()
    """The command line that started it."""
    step: int = 0
    """Optimizer steps at which this state was saved."""
    saved: float = 0.0
    """When this state was saved, seconds since the epoch."""
    files: Mapping[str, int] = field(default_factory=dict)
    """The state's files and their sizes in bytes."""

    def continues(self, earlier: RunRecord) -> RunRecord:
        """Return this run as the continuation of an earlier one: with its id and start."""
        return replace(self, id=earlier.id, started=earlier.started)

    def differences(self, other: RunRecord) -> list[str]:
        """Return how another run differs from this one, in words; empty when they are one."""
        ours, theirs = ({"script": run.script, **run.identity} for run in (self, other))
        return [
            f"{'' if key == 'script' else '--'}{key} was {theirs.get(key, 'not given')} and is {ours.get(key, 'not given')}"
            for key in dict.fromkeys([*ours, *theirs])
            if ours.get(key) != theirs.get(key)
        ]


def describe(script: str, args: Namespace) -> RunRecord:
    """Return the record of a run that begins with these final arguments."""
    given = {name: getattr(args, name, None) for name in _IDENTITY}
    identity = {
        name: os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else str(value)
        for name, value in given.items()
        if value is not None and value != ""
    }
    return RunRecord(script, identity, command=tuple(sys.orig_argv))


def write(folder: Path, record: RunRecord, step: int) -> None:
    """Write a run's record into a state whose other files are all there."""
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE
    }
    row = asdict(replace(record, step=step, saved=time.time(), files=files))
    (folder / FILE).write_text(json.dumps(row, indent=1), encoding="utf-8")


def read(folder: Path) -> RunRecord | None:
    """Return the record of a state; None when it has none that can be read (saved without kohya_ext, or damaged)."""
    try:
        row = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return RunRecord(**{**row, "command": tuple(row["command"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


_current: RunRecord | None = None


def begin(record: RunRecord) -> None:
    """Make a record that of this process's run."""
    global _current
    _current = record


def current() -> RunRecord | None:
    """Return the record of this process's run; None before its arguments are final."""
    return _current
