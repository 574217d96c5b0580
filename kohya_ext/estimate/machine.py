"""The GPU and host of this machine: rates from cards.tsv, replaced by those that `calibrate` measured, corrected by real runs.

Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from kohya_ext import cache
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.seconds import CONSTANTS
from kohya_ext.installed_gpus import first_gpu
from kohya_ext.renames import replace_text

#: The launch cost of the hosts behind the constants: microseconds of ``mul_forward_and_backward`` in kohya_ext.gpu.rates.
#: The H100's machine of benchmarks/results has 27.2, and a launch of its training steps takes 2.65 times the constant.
REFERENCE_LAUNCH = 10.3

#: Runs whose times correct the predictions; older ones are dropped.
_RUNS = 20


def gpu() -> Gpu | None:
    """Return this machine's first GPU; None without one, or if its rates are neither known nor measured."""
    first = first_gpu()
    return None if first is None else of(first.name, first.memory)


def of(name: str, memory: int | None = None) -> Gpu | None:
    """Return the GPU that the driver calls ``name``, with what was measured on this machine; None if nothing is known."""
    known = gpus.find(name, memory)
    measured = _read(_file(name)).get("measured")
    if measured is not None:
        return _measured(name, measured, known)
    return None if known is None else replace(known, name=name)


def named(name: str, host: str | None = None) -> Gpu:
    """Return the GPU with a name: this machine's if it is that one and no kind of ``host`` is given.

    Raises UserError for an unknown name.
    """
    if host is not None:
        return gpus.on(host, gpus.named(name))
    wanted = gpus.find(name)
    here = first_gpu()
    if here is not None and (here.name == name or (wanted is not None and gpus.find(here.name, here.memory) == wanted)):
        return of(here.name, here.memory) or gpus.named(name)
    return gpus.named(name)


def add_gpu_host(parser: argparse.ArgumentParser) -> None:
    """Add ``--gpu_host`` to a command that has ``--gpu``."""
    parser.add_argument(
        "--gpu_host",
        "--gpu-host",
        choices=[*gpus.HOSTS],
        default=argparse.SUPPRESS,
        help="the computer of --gpu, whose launches cost more under Windows and on Google Colab; default: like this one",
    )


def chosen(options: Mapping[str, Any]) -> Gpu | None:
    """Return the GPU of a command's ``gpu`` and ``gpu_host``; None without them. Raises UserError for the second alone."""
    if "gpu" in options:
        return named(options["gpu"], options.get("gpu_host"))
    if "gpu_host" in options:
        raise UserError('--gpu_host is about the GPU of --gpu: give its name, for example --gpu "RTX 4070"')
    return None


def _measured(name: str, measured: Mapping[str, Any], known: Gpu | None) -> Gpu:
    rates = {kind: rate / CONSTANTS.product for kind, rate in measured["products"].items()}
    base = known or Gpu(
        name, rates, 0.0, measured["cache"], 0.0, measured["memory"], measured["architecture"], checked="no",
        host=gpus.this_host(),
    )  # fmt: skip
    return replace(
        base,
        name=name,
        rates={**base.rates, **rates},
        bandwidth=measured["bandwidth"] / CONSTANTS.bandwidth,
        bus=measured["bus"],
        cache=measured["cache"],
        launch=measured["launch_microseconds"] / REFERENCE_LAUNCH,
        measured=True,
    )


def keep_measured(name: str, measured: Mapping[str, Any]) -> Path:
    """Write the rates that `calibrate` measured; return the file. Raises OSError if it cannot be written."""
    file = _file(name)
    _write(file, {**_read(file), "measured": measured, "ratios": []})
    return file


def keep_ratio(name: str, ratio: float) -> None:
    """Keep how much longer a run's steps took than predicted. Ignores write errors."""
    file = _file(name)
    known = _read(file)
    with contextlib.suppress(OSError):
        _write(file, {**known, "ratios": [*known.get("ratios", ()), round(ratio, 3)][-_RUNS:]})


def correction(name: str) -> float:
    """Return the median ratio of measured to predicted seconds of this machine's runs; 1 without any."""
    ratios = _read(_file(name)).get("ratios")
    return float(median(ratios)) if ratios else 1.0


def _file(name: str) -> Path:
    return cache.folder() / "gpus" / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def _write(file: Path, values: Mapping[str, Any]) -> None:
    """Replace the file atomically, so that a run that ends at the same time does not read half of it."""
    replace_text(file, json.dumps(values, indent=1) + "\n")


def _read(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
