"""Upstream's fastest configuration on the GPU of each tier, from the package's table. Nothing here imports torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.estimate import cache, gpus, predict
from kohya_ext.estimate.result import Estimate
from kohya_ext.planning.plan import NothingFitsError, plan
from kohya_ext.planning.tiers import Tier
from kohya_ext.sdscripts.checkouts import Checkout

#: A file of this package, written by tools/make_upstream_table.py.
TABLE = "upstream.json"

#: Turns off the extension, and keeps `plan` from checkpointing a part of the blocks, which upstream cannot.
WITHOUT_EXTENSION = {"disable_patch": "*", "gradient_checkpointing_ratio": 1}


@dataclass(frozen=True)
class Upstream:
    """A configuration of upstream's own options."""

    options: str
    """What it adds to the family's base preset; empty for the base preset itself."""
    estimate: Estimate


def fastest(tier: Tier) -> Upstream | None:
    """Return upstream's fastest configuration on a tier's GPU with the tier's batch size.

    None if nothing fits. Raises KeyError for a tier that the table lacks.
    """
    known = _table()[key(tier)]
    return None if known is None else Upstream(known["options"], Estimate(**known["estimate"]))


def search(checkout: Checkout, tier: Tier, announce: Callable[[str], None]) -> Upstream | None:
    """Search the same configuration with `plan`: makes estimates that are not cached, about 20 seconds each."""
    script = preset_files.scripts(tier.family)[0]
    base = preset_files.load([f"{tier.family}/base"], script).values
    fixed: dict[str, object] = {**WITHOUT_EXTENSION, "train_batch_size": tier.config.train_batch_size}
    if "model_type" in base:
        fixed["model_type"] = base["model_type"].value  # selects the family of a shared script
    command = CommandLine(checkout.script(script), option_words(fixed), {})
    try:
        answer = plan(checkout, command, tier.card, gpus.typical(tier.card), announce).answer
    except NothingFitsError:
        return None
    before = {**fixed, "disable_patch": ("*",), "preset": (f"{tier.family}/base",), "gradient_accumulation_steps": 1}
    added = {name: value for name, value in answer.command.given.items() if value != before.get(name)}
    return Upstream(" ".join(option_words(added)), predict.estimate(checkout, answer.command, timed=True))


def key(tier: Tier) -> str:
    """Return what the answer depends on, as text: family, GPU size and batch size."""
    return f"{tier.family} {tier.about['vram_gb']}GB batch {tier.config.train_batch_size}"


@functools.cache
def _table() -> Mapping[str, Any]:
    return read_table(Path(str(files("kohya_ext.planning") / TABLE)))


def read_table(file: Path) -> dict[str, Any]:
    """Return the table's rows by :func:`key`, None where nothing fits; empty for an older :data:`cache.METHOD`."""
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return dict(table["rows"]) if table.get("method") == cache.METHOD else {}


def row(best: Upstream | None) -> dict[str, Any] | None:
    """Return a configuration as a row of the table."""
    return None if best is None else asdict(best)


def write_table(file: Path, rows: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Write rows by :func:`key`, one per line."""
    lines = ",\n".join(f"{json.dumps(name)}:{json.dumps(each, separators=(',', ':'))}" for name, each in sorted(rows.items()))
    head = f'"written_by":"python tools/make_upstream_table.py","method":{cache.METHOD}'
    file.write_text(f'{{{head},"rows":{{\n{lines}\n}}}}\n', encoding="utf-8")
