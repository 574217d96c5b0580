"""What `tune` measured on this machine, by configuration, in the user's cache.

`plan` and `--preset auto` prefer it to predictions. A measurement is used only with the same GPU, driver, system and packages.
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext import cache as user_cache
from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config
from kohya_ext.installed_gpus import driver_version, first_gpu
from kohya_ext.renames import replace_text

#: Raise it when the files change, to ignore older ones.
SCHEMA = 1

FOLDER = "tunes"

#: Packages whose version changes a step's time.
PACKAGES = ("torch", "triton", "bitsandbytes", "xformers", "accelerate", "diffusers", "transformers", "kohya-ext")

#: The most runs that are kept of a machine; older ones are removed.
_MOST = 200


@dataclass(frozen=True)
class Tuned:
    """One measured configuration."""

    config: Mapping[str, Any]
    """What the measurement depends on: :func:`configuration`."""
    seconds: float = 0.0
    """Median seconds of an image; 0 if the run failed."""
    spread: float = 0.0
    """Distance of the quartiles."""
    waiting: float | None = None
    """Share of the time in which the step waited for data; None if that was not measured."""
    reserved: int = 0
    """Peak of the allocator's reserved bytes."""
    on_card: int = 0
    """Most bytes in use on the GPU, by all programs."""
    features: Sequence[str] = ()
    """What --speed turned on."""
    difference: float | None = None
    """Difference of the gradients with these features from eager ones, as a share of their norm; None without a trial."""
    failed: str = ""
    """Why the run could not be measured; empty if it was."""
    sd_scripts: str = ""
    """The release of sd-scripts; empty if it is not known."""
    day: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))

    @property
    def does_not_fit(self) -> bool:
        """Whether the run was out of memory."""
        return self.failed == OUT_OF_MEMORY


OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Judged:
    """Whether an 8-bit base is good enough for a checkpoint."""

    precision: str
    is_good: bool
    loss: float
    """Root mean square of the relative changes of the losses."""
    day: str


def configuration(command: CommandLine) -> dict[str, Any]:
    """Return what the time of a command line's step depends on, as JSON data. Raises UserError as an estimate does."""
    config = memory_config.normalized(memory_config.read(command)[0])
    settings = command.settings
    own = {"speed": settings["speed"], "disabled": sorted(settings.disable_patch)}
    plain: dict[str, Any] = json.loads(json.dumps({**config.key(), **own}))
    return plain


def machine(gpu: str) -> dict[str, str]:
    """Return what all measurements on this machine's GPU with a name depend on."""
    versions = {name: version for name in PACKAGES if (version := cache.version(name)) is not None}
    return {"gpu": gpu, "driver": driver_version(), "system": sys.platform, **versions}


def keep(machine: Mapping[str, str], runs: Sequence[Tuned]) -> None:
    """Keep measurements next to those of other configurations. Raises OSError."""
    new = [run.config for run in runs]
    others = [run for run in load(machine) if run.config not in new]
    document = {"schema": SCHEMA, "machine": dict(machine), "runs": [asdict(run) for run in [*others, *runs][-_MOST:]]}
    replace_text(file_of(machine), json.dumps(document, indent=1) + "\n")


def load(machine: Mapping[str, str]) -> list[Tuned]:
    """Return what was measured on a machine; nothing from a damaged file or one of another release."""
    try:
        document = json.loads(file_of(machine).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA or document["machine"] != machine:
            return []
        return [_checked(run) for run in document["runs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _checked(run: Mapping[str, Any]) -> Tuned:
    """Return a run of a file. Raises TypeError or ValueError for one that `tune` has not written."""
    tuned = Tuned(**{**run, "features": tuple(run["features"])})
    numbers = [tuned.seconds, tuned.spread, tuned.waiting or 0, tuned.reserved, tuned.on_card]
    if not isinstance(tuned.config, dict) or not all(0 <= float(number) < 1e15 for number in numbers):
        raise ValueError("not a measurement")
    if (tuned.seconds == 0) != bool(tuned.failed):
        raise ValueError("neither measured nor failed")
    return tuned


def file_of(machine: Mapping[str, str]) -> Path:
    """Return the file with the measurements of a machine."""
    digest = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:16]
    return user_cache.folder() / FOLDER / f"{digest}.json"


def base_of(command: CommandLine) -> str | None:
    """Return a command line's 8-bit base: what follows ``--base_precision``, with the option for convolutions; None without."""
    precision = command.settings["base_precision"]
    return f"{precision} --int8_convolutions" if precision and command.settings["int8_convolutions"] else precision


def keep_judgement(command: CommandLine, precision: str, is_good: bool, loss: float) -> None:
    """Keep whether an 8-bit base is good enough for a command line's checkpoint. Raises OSError."""
    row = {"precision": precision, "is_good": is_good, "loss": loss, "day": time.strftime("%Y-%m-%d")}
    file = _judgements_of(command)
    if file is not None:
        replace_text(file, json.dumps({**_read(file), "schema": SCHEMA, precision: row}, indent=1) + "\n")


def judgement(command: CommandLine) -> Judged | None:
    """Return the judgement on the 8-bit base of a command line and its checkpoint; None without one."""
    file, precision = _judgements_of(command), base_of(command)
    row = {} if file is None or precision is None else _read(file)
    if row.get("schema") != SCHEMA:
        return None
    try:
        judged = Judged(**row[str(precision)])
        return judged if math.isfinite(float(judged.loss)) else None
    except (KeyError, TypeError, ValueError):
        return None


def _judgements_of(command: CommandLine) -> Path | None:
    """Return the file with the judgements on a command line's checkpoint; None without a file of weights."""
    name = command.values.get("pretrained_model_name_or_path")
    try:
        checkpoint = Path(str(name)).resolve()
        about = checkpoint.stat()
    except (OSError, ValueError):
        return None
    text = json.dumps([command.name, str(checkpoint), about.st_size, about.st_mtime_ns])
    return user_cache.folder() / FOLDER / f"base-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def of_first_gpu() -> list[Tuned]:
    """Return what was measured on this machine's first GPU."""
    if not (user_cache.folder() / FOLDER).is_dir():  # asking the driver takes longer
        return []
    here = first_gpu()
    return [] if here is None else load(machine(here.name))


def find(runs: Sequence[Tuned], command: CommandLine) -> Tuned | None:
    """Return the measurement of a command line among some; None without one."""
    if runs:
        with contextlib.suppress(UserError):
            config = configuration(command)
            return next((run for run in reversed(runs) if run.config == config), None)
    return None
