"""Upstream's fastest configuration on the GPU of each tier, from the package's table. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.config.settings import options
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import cache, gpus, step_time
from kohya_ext.estimate.result import Estimate
from kohya_ext.planning.plan import NothingFitsError, plan
from kohya_ext.planning.tiers import Tier, fits
from kohya_ext.sdscripts.checkouts import Checkout

#: A file of this package, written by tools/make_upstream_table.py.
TABLE = "upstream.json"

#: Turns off the extension, and keeps `plan` from checkpointing a part of the blocks, which upstream cannot.
WITHOUT_EXTENSION = {"disable_patch": "*", "gradient_checkpointing_ratio": 1}

_OURS = frozenset(name for name, _ in options())


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
    """Search the same configuration: makes estimates that are not cached.

    It is the faster one of `plan`'s answer, and of the preset for this size that is not experimental. The extension is off.
    """
    script, gpu = preset_files.scripts(tier.family)[0], gpus.typical(tier.card)
    base = {name: each.value for name, each in preset_files.load([f"{tier.family}/base"], script).values.items()}
    fixed: dict[str, object] = {**WITHOUT_EXTENSION, "train_batch_size": tier.config.train_batch_size}
    fixed["resolution"] = tier.config.resolution
    if "model_type" in base:
        fixed["model_type"] = base["model_type"]  # selects the family of a shared script
    command = CommandLine(checkout.script(script), option_words(fixed), {}, has_bf16=True)
    candidates = [command.with_tier(f"{tier.family}/{tier.about['vram_gb']}gb")]
    with contextlib.suppress(NothingFitsError):
        candidates.append(plan(checkout, command, tier.card, gpu, announce).answer.command)
    estimates = estimation.estimate_all(checkout, candidates, timed=True)
    fitting = [index for index, estimate in enumerate(estimates) if fits(estimate, tier.card)]
    if not fitting:
        return None
    best = min(fitting, key=step_time.slowness(estimates, gpu).__getitem__)
    usual = {**base, **fixed, "gradient_accumulation_steps": 1}
    theirs = {name: value for name, value in candidates[best].values.items() if name not in _OURS}
    added = {name: value for name, value in theirs.items() if value != usual.get(name, False)}
    return Upstream(" ".join(option_words(added)), estimates[best])


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
