"""Record the run and the files of a saved state, as JSON in the state's folder.

The record is written last, so a state that has one is complete. Reading it does not need torch.
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

from kohya_ext.config.command_line import without_secrets
from kohya_ext.renames import patiently
from kohya_ext.run.output_files import is_same_path, output_name

FILE = "kohya_ext_run.json"
"""The file in a state's folder."""

#: Arguments that distinguish runs of the same name. Those that may change on a resume (steps, learning rate, batch size,
#: memory savings) are left out.
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
    """The arguments in ``_IDENTITY`` that were given, with their values."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identifies the run in all of its states, across resumes."""
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    """Local time at which the run's first process started."""
    command: tuple[str, ...] = ()
    """The command line that started it, without secret options."""
    step: int = 0
    """Optimizer steps before this state was saved."""
    saved: float = 0.0
    """Time at which this state was saved, in seconds since 1970; of a running process, that of the state it has resumed.

    Later than that of all states before it, although a clock may be set back: the newest state is the one to resume."""
    files: Mapping[str, int] = field(default_factory=dict)
    """The state's files and their sizes in bytes."""
    output: str = ""
    """Output folder and name, as one absolute path, by which a state that had to be saved to another folder is found."""

    def as_continuation_of(self, earlier: RunRecord) -> RunRecord:
        """Return this run as the continuation of an earlier one, with the earlier id and start time; it saves later."""
        return replace(self, id=earlier.id, started=earlier.started, saved=earlier.saved)

    def has_same_output(self, other: RunRecord) -> bool:
        """Return whether another run has this output folder and name."""
        (folder, name), (its_folder, its_name) = map(os.path.split, (self.output, other.output))
        return os.path.normcase(name) == os.path.normcase(its_name) and is_same_path(folder, its_folder)

    def differences(self, other: RunRecord) -> list[str]:
        """Return one text per argument in which another run differs; empty when both are the same run."""
        ours, theirs = ({"script": run.script, **run.identity} for run in (self, other))
        return [
            f"{'' if key == 'script' else '--'}{key} was {theirs.get(key, 'not given')} and is {ours.get(key, 'not given')}"
            for key in dict.fromkeys([*ours, *theirs])
            if not is_same_path(ours.get(key, ""), theirs.get(key, ""))
        ]


def describe(script: str, args: Namespace) -> RunRecord:
    """Return the record of a new run with these final arguments."""
    given = {name: getattr(args, name, None) for name in _IDENTITY}
    identity = {
        name: os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else str(value)
        for name, value in given.items()
        if value is not None and value != ""
    }
    output = os.path.abspath(os.path.join(getattr(args, "output_dir", None) or "", output_name(args)))
    return RunRecord(script, identity, command=tuple(without_secrets(sys.orig_argv)[0]), output=output)


def write(folder: Path, record: RunRecord, step: int) -> None:
    """Write a run's record into a state; all other files must be written already."""
    global _last_saved
    _last_saved = max(time.time(), record.saved + _MOMENT, _last_saved + _MOMENT)
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE
    }
    row = asdict(replace(record, step=step, saved=_last_saved, files=files))
    (folder / FILE).write_text(json.dumps(row, indent=1), encoding="utf-8")


def read(folder: Path) -> RunRecord | None:
    """Return the record of a state; None when it is missing (saved without kohya_ext) or damaged."""
    try:
        row = json.loads(patiently(lambda: (folder / FILE).read_text(encoding="utf-8")))
        record = RunRecord(**{**row, "command": tuple(row["command"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if _is_valid(record) else None


def _is_valid(record: RunRecord) -> bool:
    """Return whether the values of a record, which may come from another person, have their types."""
    texts = (record.script, record.id, record.started, record.output, *record.command)
    if not isinstance(record.identity, dict) or not isinstance(record.files, dict):
        return False
    counts = (record.step, *record.files.values())
    return (
        all(isinstance(text, str) for text in texts)
        and all(type(count) is int for count in counts)
        and type(record.saved) in (int, float)
        and abs(record.saved) < sys.maxsize
    )


_MOMENT = 0.001
"""Seconds between two states, at least."""

_last_saved = 0.0
"""``saved`` of the newest state of this process."""

_current: RunRecord | None = None


def begin(record: RunRecord) -> None:
    """Set the record of this process's run."""
    global _current
    _current = record


def current() -> RunRecord | None:
    """Return the record of this process's run; None before its arguments are final."""
    return _current
