"""Figures that need not be made again: the package's table for the shipped presets, and the user's cache."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.sdscripts.checkouts import Checkout, cache_folder

if TYPE_CHECKING:
    from kohya_ext.estimate.result import Estimate

#: Raised whenever the way of measuring changes, so that older figures are made again.
METHOD = 2

#: Beside this module; written by tools/make_estimate_table.py.
TABLE = "table.json"


def find(checkout: Checkout, choices: MemoryConfig, disabled_patches: Sequence[str]) -> dict[str, Any] | None:
    """Return the known figures of normalized choices, as :class:`Estimate`'s fields, or None.

    The package's table holds for a layout of sd-scripts, whatever torch is installed; the cache for exact versions.
    """
    if not disabled_patches and (row := shipped(choices, checkout.layout)) is not None:
        return row
    return _read(_file(checkout, choices.key(), disabled_patches))


def shipped(choices: MemoryConfig, layout: str | None = None) -> dict[str, Any] | None:
    """Return the package's own figures for normalized choices, on a layout of sd-scripts or whichever has them; or None."""
    made = _table()
    alike = layout is None or [layout, choices.kind] in made["alike"]
    row = made["rows"].get(text(choices.key()))
    return row if row is not None and (alike or row["layout"] == layout) else None


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


@functools.cache
def _table() -> dict[str, Any]:
    """The package's table, its rows by their choices; without rows when it was made another way than figures are now."""
    made = read_table(Path(str(files("kohya_ext.estimate") / TABLE)))
    return {**made, "rows": {text(row["choices"]): row for row in made["rows"]}}


def read_table(file: Path) -> dict[str, Any]:
    """Return a table: ``rows``, each an :class:`Estimate`'s fields, and ``alike``.

    That names the layouts on which a kind of model came out as in the rows, which were made on another.
    """
    made = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return made if made.get("method") == METHOD else {"method": METHOD, "alike": [], "rows": []}


def write_table(file: Path, rows: Sequence[Mapping[str, Any]], alike: Sequence[Sequence[str]]) -> None:
    """Write a table, a row a line."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = f'"made_by":"python tools/make_estimate_table.py","method":{METHOD},"alike":{json.dumps(alike)}'
    file.write_text(f'{{{head},"rows":[\n{lines}\n]}}\n', encoding="utf-8")


def text(key: Mapping[str, Any]) -> str:
    """Return choices as text that is the same for the same choices."""
    return json.dumps(key, sort_keys=True)


def figures(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a row says without what it was asked and made with."""
    return {name: value for name, value in row.items() if name not in ("choices", "made_with", "layout")}


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
