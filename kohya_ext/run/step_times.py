"""How long a step took in earlier runs of the same settings on this machine: what a run's expected time is made of.

A time is measured (patches/step_times.py), never computed: where these settings have not been run, nothing is expected.
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

FEWEST = 5
"""Steps that make a measurement."""

_MOST = 200
"""Measurements that are kept, the newest."""

#: Pieces of the names of arguments that say where things go, how long it lasts or how fast is learnt.
_NO_MATTER = (
    *("output", "log", "save_", "sample_", "resume", "metadata", "wandb", "huggingface", "comment", "seed", "config_file"),
    *("max_train_", "initial_", "skip_until", "learning_rate", "lr_", "_lr", "data_dir", "in_json", "tokenizer_cache"),
)


def identify(script: Path, args: Namespace, settings: Settings) -> str:
    """Return what two runs have in common whose steps take the same time."""
    said = {name: value for name, value in vars(args).items() if not any(piece in name for piece in _NO_MATTER)}
    ours = {option.name: settings[option] for option in patch_options()}
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    text = json.dumps([script.name, said, ours, cards], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known(key: str) -> tuple[float, str] | None:
    """Return the seconds that a step took, and the day, as the last run with this key measured them."""
    try:
        measured = json.loads(_file(key).read_text(encoding="utf-8"))
        return float(measured["seconds"]), str(measured["day"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: str, seconds: float, steps: int) -> None:
    """Keep a measurement of at least :data:`FEWEST` steps. What cannot be written is not worth a word."""
    if steps < FEWEST:
        return
    with contextlib.suppress(OSError):
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        measured = {"seconds": round(seconds, 4), "steps": steps, "day": time.strftime("%Y-%m-%d")}
        _file(key).write_text(json.dumps(measured), encoding="utf-8")
        for old in sorted(_file(key).parent.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)[:-_MOST]:
            old.unlink()


def in_words(seconds: float) -> str:
    """``2 h 10 min``, ``10 min``, ``40 s``."""
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


def begin(key: str) -> None:
    """Name what this process's run measures."""
    global _key
    _key = key


def key_of_this_run() -> str | None:
    """What this process's run measures; None when nobody has looked at its arguments."""
    return _key
