"""Store measured step times on this machine, to predict the duration of later runs with the same settings.

patches/step_times.py measures them. Settings that have not been run have no prediction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from kohya_ext import cache
from kohya_ext.config.settings import Settings, patch_options

MIN_STEPS = 5
"""Minimum number of steps of a stored measurement."""

_LONGEST = 1e6
"""A longer step, in seconds, comes from a damaged file."""

_MAX_FILES = 200
"""Number of measurements to keep; older ones are removed."""

#: Argument-name substrings that don't affect step time: output paths, run length, learning rates.
_IGNORED = (
    *("output", "log", "save_", "sample_", "resume", "metadata", "wandb", "huggingface", "comment", "seed", "config_file"),
    *("max_train_", "initial_", "skip_until", "learning_rate", "lr_", "_lr", "data_dir", "in_json", "tokenizer_cache"),
)


def cache_key(script: Path, args: Namespace, settings: Settings) -> str:
    """Return a hash of all settings that affect the time of a step."""
    script_values = {name: value for name, value in vars(args).items() if not any(part in name for part in _IGNORED)}
    patch_values = {option.name: settings[option] for option in patch_options()}
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    text = json.dumps([script.name, script_values, patch_values, gpus], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(key: str) -> tuple[float, str] | None:
    """Return the seconds per step and the date of the last measurement with this key, or None."""
    try:
        measured = json.loads(_file(key).read_text(encoding="utf-8"))
        seconds = float(measured["seconds"])
        return (seconds, str(measured["day"])) if 0 < seconds < _LONGEST else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def store(key: str, seconds: float, steps: int) -> None:
    """Store a measurement of at least :data:`MIN_STEPS` steps. Ignores write errors."""
    if steps < MIN_STEPS:
        return
    with contextlib.suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        measured = {"seconds": round(seconds, 4), "steps": steps, "day": time.strftime("%Y-%m-%d")}
        _file(key).write_text(json.dumps(measured), encoding="utf-8")
        for old in sorted(_file(key).parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)[:-_MAX_FILES]:
            old.unlink()


def format_duration(seconds: float) -> str:
    """Return ``2 h 10 min``, ``10 min`` or ``40 s``."""
    return " ".join(_parts(seconds))


def _parts(seconds: float) -> Iterator[str]:
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        yield f"{hours} h"
    if minutes and seconds >= 60:
        yield f"{minutes} min"
    if seconds < 60:
        yield f"{seconds:.0f} s"


def _file(key: str) -> Path:
    return cache.folder() / "step_times" / f"{key}.json"


_key: str | None = None


def set_current_key(key: str) -> None:
    """Set the key under which this process's run stores its measurement."""
    global _key
    _key = key


def current_key() -> str | None:
    """Return the key of this process's run; None before preflight."""
    return _key
