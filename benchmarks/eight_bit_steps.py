"""Predict LoRA steps with an 8-bit base, and upstream's with checkpointing, on several GPUs.

    python -m benchmarks.eight_bit_steps [--only sdxl-lora] [--again]

Writes results/eight_bit_steps.json, the estimate of each variant: its memory, and the counted operations, bytes and launches of
a step, from which :func:`seconds` predicts its time on each GPU. The memory that 8 bits free lets fewer blocks be checkpointed:
``fitted`` variants have the smallest ratio with which int8 needs no more memory than upstream. An estimate takes 20 to 60 s;
those in the output file are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import results
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import gpus, step_time
from kohya_ext.estimate.result import Estimate
from kohya_ext.estimate.seconds import CONSTANTS, Constants, Prediction
from kohya_ext.planning.checkpointing_ratio import smallest_ratio
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch

OUTPUT = results.FOLDER / "eight_bit_steps.json"

FAMILIES = ("sdxl-lora", "flux-lora", "lumina-lora")
CARDS = ("RTX 3060", "RTX 3090", "RTX 4070", "RTX 4090", "H100")
UPSTREAM = "upstream"

#: Upstream's step, and the extension's without 8 bits and with them. CUDA graphs do nothing for models that they cannot record.
VARIANTS: Mapping[str, str] = {
    UPSTREAM: "--disable_patch *",
    "fused graphs": "--fused_operations --cuda_graphs",
    "compiled graphs": "--fused_operations --selective_torch_compile --cuda_graphs",
    "int8 fused": "--base_precision int8 --fused_operations",
    "int8 fused graphs": "--base_precision int8 --fused_operations --cuda_graphs",
    "int8 compiled graphs": "--base_precision int8 --fused_operations --selective_torch_compile --cuda_graphs",
    "fp8 compiled graphs": "--base_precision fp8 --fused_operations --selective_torch_compile --cuda_graphs",
}

#: Variants for which the smallest ratio of checkpointed blocks is searched -> those that run with it as well. They need less
#: memory, and their estimates take longer.
FITTED: Mapping[str, Sequence[str]] = {
    "int8 fused": (),
    "int8 fused graphs": ("int8 compiled graphs", "fp8 compiled graphs"),
}


def command_line(folder: Path, family: str, options: str) -> CommandLine:
    """Return a family's LoRA with checkpointing and some options; ``folder`` has its script."""
    script = preset_files.scripts(family)[0]
    words = ["--preset", f"{family}/base", "--gradient_checkpointing", *options.split()]
    return CommandLine(folder / script, words, {})


def seconds(family: str, options: str, estimate: Estimate, constants: Constants = CONSTANTS) -> dict[str, Prediction]:
    """Return the predicted time of a variant on each GPU that has kernels for it."""
    command = command_line(Path(), family, options)
    times = {card: step_time.by_rates(estimate, command, gpus.named(card), constants) for card in CARDS}
    return {card: time for card, time in times.items() if time is not None}


def measure(checkout: Checkout, family: str, known: dict[str, Any], write: Any) -> None:
    """Add a family's missing variants to ``known``."""

    def ask(options: str, ratio: float = 1.0) -> Estimate:
        more = "" if ratio == 1 else f" --gradient_checkpointing_ratio {ratio:g}"
        return estimation.estimate(checkout, command_line(checkout.path, family, options + more), timed=True)

    def ask_all(options: str, ratios: Sequence[float]) -> list[Estimate]:
        return [ask(options, ratio) for ratio in ratios]

    def add(name: str, options: str, estimate: Estimate) -> None:
        known[name] = {"options": options, "estimate": asdict(estimate)}
        write()

    for name, options in VARIANTS.items():
        if name not in known:
            add(name, options, ask(options))
    for searched, others in FITTED.items():
        missing = [name for name in (searched, *others) if f"{name}, fitted" not in known]
        if not missing:
            continue
        usable = Estimate(**known[UPSTREAM]["estimate"]).total
        smallest = smallest_ratio(partial(ask_all, VARIANTS[searched]), usable)
        assert smallest is not None, "8 bits need less memory than upstream"
        for name in missing:
            fitted = f"{VARIANTS[name]} --gradient_checkpointing_ratio {smallest[0]:g}"
            add(f"{name}, fitted", fitted, ask(VARIANTS[name], smallest[0]))


def main() -> int:
    """Predict the missing rows, and write the output file after each; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="FAMILY", help="only families whose name begins with this text")
    parser.add_argument("--again", action="store_true", help="predict rows that are in the output file again")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}

    def write() -> None:
        document.update({"sd_scripts": checkout.version, **results.kohya_ext_commit()})
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    for family in FAMILIES:
        if family.startswith(given.only):
            known = {} if given.again else document["rows"].get(family, {})
            document["rows"][family] = known
            measure(checkout, family, known, write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
