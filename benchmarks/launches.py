"""Count the kernel launches of a training step, and how often the host waits for the GPU, at full size.

    python -m benchmarks.launches [--only sdxl-lora] [--variants upstream,default] [--scratch FOLDER]

Each family's LoRA script trains on a virtual GPU (see benchmarks/full_size.py), with and without gradient checkpointing, as
upstream does and with the extension. Both counts are exact.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import full_size, results
from benchmarks.full_size import Row
from kohya_ext.config import preset_files
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.units import GIB

OUTPUT = results.FOLDER / "launches.json"

#: Variant -> options. Without patches the launcher runs upstream's script unchanged; a preset completes its arguments.
VARIANTS = {
    "upstream": ["--disable_patch", "*"],
    "default": [],
    "fused": ["--fused_operations"],
    "compiled": ["--selective_torch_compile"],
}

#: Steps of a run that are not counted: the first creates optimizer state, the second searches paths in the graph.
FIRST_STEPS = 2
MEASURED_STEPS = 3
CARD = 80 * GIB


def rows() -> Iterator[Row]:
    """Yield each family's LoRA with and without checkpointing."""
    for name in dict.fromkeys(family for family, _, _ in preset_files.shipped() if family.endswith("-lora")):
        for option in ("--gradient_checkpointing", "--no-gradient_checkpointing"):
            yield Row(f"{name} {option}", preset_files.scripts(name)[0], ["--preset", f"{name}/base", option], CARD)


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of the measured steps."""
    measured = steps[FIRST_STEPS:]
    return {
        "launches": statistics.median(step["launches"] for step in measured),
        "syncs": statistics.median(step["syncs"] for step in measured),
    }


def main() -> int:
    """Count in all rows, and write the output file after each; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--only", default="", help="count only in rows whose name begins with this text")
    parser.add_argument("--variants", default="upstream,default,fused", help="variants to count")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for row in rows():
            if not row.name.startswith(given.only):
                continue
            arguments, config = full_size.training_arguments(row, checkout, scratch, FIRST_STEPS + MEASURED_STEPS + 1)
            count = full_size.passes(config, FIRST_STEPS + MEASURED_STEPS)
            measured: dict[str, Any] = document["rows"].setdefault(
                row.name, {"arguments": " ".join([row.script, *row.arguments])}
            )
            for name in given.variants.split(","):
                words = [*arguments, *VARIANTS[name]]
                used = full_size.run(row, checkout, scratch, given, words, count, full_size.tokens(checkout, config))
                failed |= "failed" in used
                measured[name] = {"failed": used["failed"]} if "failed" in used else summary(used["steps"])
                print(f"{row.name} {name}: {measured[name]}", file=sys.stderr, flush=True)
            document |= {"sd_scripts": checkout.version, **results.kohya_ext_commit()}
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
