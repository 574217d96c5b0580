"""Known estimates: the package's table for the shipped presets, and the user's cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from kohya_ext import cache as user_cache
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.renames import replace_text
from kohya_ext.sdscripts.checkouts import Checkout

#: Bump when the measurement changes, to invalidate cached estimates.
METHOD = 26

#: A file of this package, written by tools/make_estimate_table.py.
TABLE = "table.json"


def find(
    checkout: Checkout, config: MemoryConfig, disabled_patches: Sequence[str], timed: bool = False
) -> dict[str, Any] | None:
    """Return the known estimate of a normalized configuration, as :class:`Estimate`'s fields, or None.

    The package's table applies to a layout of sd-scripts with any torch, the cache to exact versions. With ``timed``, an
    estimate without counted kernels does not count.
    """
    shipped_row = None if disabled_patches else shipped(config, checkout.layout)
    for row in (shipped_row, read(file_of(checkout, config.key(), disabled_patches))):
        if row is not None and not (timed and row.get("work") is None):
            return row
    return None


def shipped(config: MemoryConfig, layout: str | None = None) -> dict[str, Any] | None:
    """Return the table's row for a normalized configuration on one layout of sd-scripts, or on any; None without a row."""
    table = _table()
    alike = layout is None or [layout, config.kind] in table["alike"]
    row = table["rows"].get(text(config.key()))
    return row if row is not None and (alike or row["layout"] == layout) else None


def keep(checkout: Checkout, estimate: Estimate, disabled_patches: Sequence[str]) -> None:
    """Write an estimate to the user's cache; without a writable cache it is measured again next time."""
    write(file_of(checkout, estimate.config, disabled_patches), estimate)


def write(path: Path, estimate: Estimate) -> None:
    """Write an estimate to a file of the cache, if it can be written."""
    with contextlib.suppress(OSError):
        replace_text(path, json.dumps(asdict(estimate), indent=1))


@functools.cache
def _table() -> dict[str, Any]:
    """Return the package's table, its rows by configuration."""
    table = read_table(Path(str(files("kohya_ext.estimate") / TABLE)))
    return {**table, "rows": {text(row["config"]): row for row in table["rows"]}}


def read_table(file: Path) -> dict[str, Any]:
    """Return a table: ``rows``, each an :class:`Estimate`'s fields, and ``alike``; empty for an older :data:`METHOD`.

    ``alike`` lists pairs of a layout and a kind of model whose estimates equal the rows of another layout.
    """
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return table if table.get("method") == METHOD else {"method": METHOD, "alike": [], "rows": []}


def write_table(file: Path, rows: Sequence[Mapping[str, Any]], alike: Sequence[Sequence[str]]) -> None:
    """Write a table, one row per line."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    head = f'"written_by":"python tools/make_estimate_table.py","method":{METHOD},"alike":{json.dumps(alike)}'
    file.write_text(f'{{{head},"rows":[\n{lines}\n]}}\n', encoding="utf-8")


def text(key: Mapping[str, Any]) -> str:
    """Return the key of a configuration as text: equal keys give equal text."""
    return json.dumps(key, sort_keys=True)


def figures(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the figures of a row's memory, without its configuration, versions, layout and kernels."""
    return {name: value for name, value in row.items() if name not in ("config", "versions", "layout", "work")}


def read(path: Path) -> dict[str, Any] | None:
    """Return a file of the cache, as :class:`Estimate`'s fields; None without one."""
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def file_of(checkout: Checkout, key: Mapping[str, Any], disabled_patches: Sequence[str]) -> Path:
    """Return the cache file, named by a hash of everything that determines the estimate."""
    determines = {
        "method": METHOD,
        "config": _plain(key),
        "disabled_patches": sorted(disabled_patches),
        "sd-scripts": checkout.commit or checkout.version,
        **{package: version(package) for package in ("kohya-ext", "torch", "accelerate", "transformers", "diffusers")},
    }
    name = hashlib.sha256(json.dumps(determines, sort_keys=True).encode()).hexdigest()
    return user_cache.folder() / "estimates" / f"{name[:32]}.json"


def version(package: str) -> str | None:
    """Return a package's version without importing it; None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(key: Mapping[str, Any]) -> Any:
    """Return the same with lists for tuples, as JSON reads them back."""
    return json.loads(json.dumps(key))
