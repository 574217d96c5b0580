"""Figures that need not be made again: the package's table for the shipped presets, and the user's cache."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_ext.sdscripts import Checkout, cache_folder
from kohya_ext.vram.choices import Choices

if TYPE_CHECKING:
    from kohya_ext.vram.estimate import Estimate

#: Raised whenever the way of measuring changes, so that older figures are made again.
METHOD = 1

#: Beside this module; written by benchmarks/vram_table.py.
TABLE = "table.json"


def find(checkout: Checkout, choices: Choices, disabled_patches: Sequence[str]) -> dict[str, Any] | None:
    """Return the known figures of normalized choices, as :class:`Estimate`'s fields, or None.

    The package's table holds for a layout of sd-scripts, whatever torch is installed; the cache for exact versions.
    """
    if not disabled_patches:
        for row in table().get(checkout.layout, ()):
            if row["choices"] == _plain(choices.key()):
                return dict(row)
    return _read(_file(checkout, choices.key(), disabled_patches))


def table() -> Mapping[str, list[dict[str, Any]]]:
    """Return the package's table: layout -> estimates. Empty when it was made another way than figures are made now."""
    made = json.loads((files("kohya_ext.vram") / TABLE).read_text(encoding="utf-8"))
    return made["layouts"] if made["method"] == METHOD else {}


def keep(checkout: Checkout, estimate: Estimate, disabled_patches: Sequence[str]) -> None:
    """Keep figures in the user's cache; a cache that cannot be written costs their being made again."""
    file = _file(checkout, estimate.choices, disabled_patches)
    beside = file.with_suffix(f".{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(asdict(estimate), indent=1), encoding="utf-8")
        beside.replace(file)
    except OSError:
        return


def _read(file: Path) -> dict[str, Any] | None:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return read if isinstance(read, dict) else None


def _file(checkout: Checkout, key: Mapping[str, Any], disabled_patches: Sequence[str]) -> Path:
    """Return the file of what determines the figures: the question, and everything that answers it."""
    determines = {
        "method": METHOD,
        "choices": _plain(key),
        "disabled_patches": sorted(disabled_patches),
        "sd-scripts": checkout.commit or checkout.version,
        **{package: version(package) for package in ("kohya-ext", "torch", "accelerate", "transformers", "diffusers")},
    }
    name = hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()
    return cache_folder().parent / "estimates" / f"{name[:32]}.json"


def version(package: str) -> str | None:
    """Return a package's version without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(key: Mapping[str, Any]) -> Any:
    """The same with lists for tuples, as JSON hands them back."""
    return json.loads(json.dumps(key))
