"""Write the files of cards/ that come from this project's own measurements, as `tune --export` writes those of users.

    python -m benchmarks.cards_from_results

They are those of gpu_time.py, whose rows name a preset, or an option, and a variant.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks import gpu_time, results
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import tuned
from kohya_ext.estimate.tuned import Tuned
from kohya_ext.tuning import cards, rows

FOLDER = results.FOLDER.parent / "cards"

#: Results of one machine with a real GPU -> file. The machines of two results differ in their processors' speed.
FILES = {
    "gpu_time.json": "nvidia-h100-80gb-hbm3.json",
    "gpu_time_h200.json": "nvidia-h200.json",
    "gpu_commands_h200.json": "nvidia-h200-presets.json",
}


def main() -> int:
    """Write all files; return 0."""
    for path, document in documents().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def documents() -> dict[Path, dict[str, Any]]:
    """Return the files and their content."""
    read = {file: json.loads((results.FOLDER / name).read_text(encoding="utf-8")) for name, file in FILES.items()}
    return {FOLDER / file: _file(measured) for file, measured in read.items()}


def _file(measured: Mapping[str, Any]) -> dict[str, Any]:
    machine, versions = measured["machine"], measured["versions"]
    driver = re.search(r"\d+(\.\d+)+", machine["driver"])
    gpu = {
        "name": machine["gpu"],
        "memory": machine["gpu_memory"],
        "capability": machine["compute_capability"],
        "driver": driver[0] if driver else "",
    }
    host = {name: machine[name] for name in ("processor", "cores", "memory")}
    known = {name: text for name, text in versions.items() if name in (*tuned.PACKAGES, "python")}
    system = machine["system"].partition("-")[0]
    return cards.document(gpu, {"system": system, **host}, known, list(_runs(measured)))


def _runs(measured: Mapping[str, Any]) -> Iterator[Tuned]:
    """Yield the last round of each row that did not fail, or the last one with a trial of --speed.

    A later visit was on another machine, so the rounds of earlier ones are left out.
    """
    last = max(each.get("visit", 0) for rounds in measured["rows"].values() for each in rounds)
    for name, rounds in measured["rows"].items():
        done = [each for each in rounds if "seconds" in each and "failed" not in each and each.get("visit", 0) == last]
        if done:
            yield _run(name, measured["sd_scripts"], next((each for each in reversed(done) if "choice" in each), done[-1]))


def _run(name: str, sd_scripts: str, measured: Mapping[str, Any]) -> Tuned:
    row, _, variant = name.rpartition(" ")
    preset, _, option = row.partition(" ")
    family = preset.partition("/")[0]
    whole = [option, "--speed", "off"] if option else []
    words = ["--preset", preset if "/" in preset else f"{preset}/base", *whole, *gpu_time.VARIANTS[variant]]
    command = CommandLine(Path(preset_files.scripts(family)[0]), words, {}, has_bf16=True)
    trial = measured.get("choice", {})
    lower, _, upper = quantiles(measured["steps"], n=4, method="inclusive")
    return Tuned(
        tuned.configuration(command),
        seconds=measured["seconds"],
        spread=round(upper - lower, 5),
        waiting=None,
        reserved=measured["reserved"],
        on_card=measured["reserved"] + measured["outside_the_allocator"],
        features=tuple(trial.get("features", ())),
        difference=rows.difference(trial),
        sd_scripts=sd_scripts,
        day=trial.get("day", ""),
    )


if __name__ == "__main__":
    sys.exit(main())
