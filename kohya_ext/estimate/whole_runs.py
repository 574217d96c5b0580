"""Known estimates of whole runs, as a dry run makes them: by the command line with everything that it names.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache
from kohya_ext.estimate.result import Estimate
from kohya_ext.sdscripts.checkouts import Checkout

#: Bump when dry runs change, to invalidate cached estimates.
METHOD = 6

#: Beginnings of the names of options that three steps without output do not depend on.
IRRELEVANT = (
    "save_", "huggingface_", "wandb_", "log_", "logging_dir", "resume", "validat", "max_validation", "journal",
    "notify", "profile_steps", "report", "stop_file", "fallback_dir", "on_oom", "base_precision_cache", "max_train_epochs",
    "reg_data_dir", "debug_dataset", "early_stopping",
)  # fmt: skip

#: Others, which a dry run replaces.
_REPLACED = (
    "output_dir", "output_name", "max_train_steps", "max_data_loader_n_workers", "vram", "preset", "strict", "preflight",
)  # fmt: skip


def find(checkout: Checkout, command: CommandLine) -> Estimate | None:
    """Return the known estimate of a command line; None without one."""
    row = cache.read(_file(checkout, command))
    return None if row is None else Estimate(**row)


def keep(checkout: Checkout, command: CommandLine, estimate: Estimate) -> None:
    """Write an estimate to the user's cache, if it can be written."""
    cache.write(_file(checkout, command), estimate)


def _file(checkout: Checkout, command: CommandLine) -> Path:
    key = {"dry run": METHOD, "script": command.name, "code": _code(checkout), "values": _values(command.values)}
    return cache.file_of(checkout, key, command.settings.disable_patch)


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that matter, with the sizes and times of the files that they name."""
    kept = {name: value for name, value in values.items() if name not in _REPLACED and not name.startswith(IRRELEVANT)}
    return {name: [str(value), *_facts(value)] for name, value in sorted(kept.items())}


def _facts(value: object) -> list[int]:
    """Return size and time of a file; nothing for other values."""
    try:
        facts = Path(value).stat() if isinstance(value, str) and value else None
    except (OSError, ValueError):
        return []
    return [] if facts is None else [facts.st_size, facts.st_mtime_ns]


def _code(checkout: Checkout) -> list[list[object]]:
    """Return the files of the scripts and their library, which forks and the user's own changes have changed."""
    folders = (checkout.path, checkout.path / "library", checkout.path / "networks")
    return [[file.name, *_facts(str(file))] for folder in folders for file in sorted(folder.glob("*.py"))]
