"""Predict images per second of one to sixteen GPUs. No two GPUs have run this.

    python -m benchmarks.scaling [--only sdxl-lora] [--again]

Writes results/scaling.json: of each training the seconds of a step on one GPU, as ``estimate --gpu`` predicts them, and the
bytes and seconds of communication on each link, as kohya_ext.estimate.communication does. The range is between complete overlap
with backward and none. Estimates take 20 to 60 s; those in the output file are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import results
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import estimation
from kohya_ext.estimate import gpus, step_time
from kohya_ext.estimate.communication import LINKS, Engine, Exchange, Link, cost
from kohya_ext.sdscripts.checkouts import find_or_fetch

OUTPUT = results.FOLDER / "scaling.json"


@dataclass(frozen=True)
class Training:
    """A training with one process for each GPU."""

    preset: str
    options: str
    engine: Engine
    tensors: int
    """Trained tensors: two of each LoRA module, or the weights of the U-Net."""
    gradient_bytes: int = 4
    averages_once: bool = False


@dataclass(frozen=True)
class Setup:
    """GPUs of a kind, and the links between two of them, between more, and between machines."""

    card: str
    two: str
    more: str
    machines: str


TRAININGS: Mapping[str, Training] = {
    "SDXL LoRA, rank 32, batch 1": Training("sdxl-lora/base", "--network_dim 32", Engine.LORA, 2 * 722),
    "SDXL LoRA, rank 32, batch 1, --ddp_average_once": Training(
        "sdxl-lora/base", "--network_dim 32", Engine.LORA, 2 * 722, averages_once=True
    ),
    "SDXL fine-tune, bf16 gradients, batch 1": Training("sdxl-finetune/base", "--full_bf16", Engine.DDP, 1680, 2),
    "FLUX LoRA, rank 16, batch 2": Training("flux-lora/24gb", "--network_dim 16", Engine.LORA, 2 * 304),
}
SETUPS: Mapping[str, Setup] = {
    "RTX 3090, PCIe 4": Setup("RTX 3090", "PCIe 4, host memory", "PCIe 4, host memory", "10 Gb network"),
    "RTX 3090, NVLink in pairs": Setup("RTX 3090", "NVLink RTX 3090", "PCIe 4, host memory", "10 Gb network"),
    "RTX 4090, PCIe 4": Setup("RTX 4090", "PCIe 4, host memory", "PCIe 4, host memory", "25 Gb network"),
    "H100, NVLink": Setup("H100", "NVLink H100", "NVLink H100", "100 Gb network"),
}
#: Processes and machines.
GROUPS = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2))


def row(training: Training, command: CommandLine, estimate: Any) -> dict[str, Any]:
    """Return a training's bytes, and its predicted images per second with each setup and number of GPUs."""
    exchange = Exchange(
        engine=training.engine,
        trained=estimate.trainable_parameters,
        tensors=training.tensors,
        processes=1,
        gradient_bytes=training.gradient_bytes,
        averages_once=training.averages_once,
    )
    alone = {}
    predictions: dict[str, Any] = {}
    for name, setup in SETUPS.items():
        time = step_time.by_rates(estimate, command, gpus.named(setup.card))
        assert time is not None, "asked for with counted kernels"
        alone[name] = round(time.seconds, 4)
        for processes, machines in GROUPS:
            run = replace(exchange, processes=processes, machines=machines)
            inside: Link = LINKS[setup.two if processes == 2 else setup.more]
            each = cost(run, inside, LINKS[setup.machines])
            images = [processes * estimate.images / seconds for seconds in each.seconds(time.seconds)]
            predictions.setdefault(name, {})[f"{machines}x{processes // machines}"] = {
                "sent": round(each.total_sent),
                "exposed": round(each.exposed, 4),
                "overlapping": round(each.overlapping, 4),
                "images_per_second": [round(value, 3) for value in sorted(images)],
            }
    return {
        "options": f"--preset {training.preset} {training.options}",
        "trained": estimate.trainable_parameters,
        "images": estimate.images,
        "seconds": alone,
        "predictions": predictions,
    }


def main() -> int:
    """Predict the missing rows, and write the output file after each; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="only trainings whose preset begins with this text")
    parser.add_argument("--again", action="store_true", help="predict rows that are in the output file again")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    for name, training in TRAININGS.items():
        if not training.preset.startswith(given.only) or (name in document["rows"] and not given.again):
            continue
        script = preset_files.scripts(training.preset.partition("/")[0])[0]
        words = ["--preset", training.preset, *training.options.split()]
        command = CommandLine(checkout.script(script), words, {})
        document["rows"][name] = row(training, command, estimation.estimate(checkout, command, timed=True))
        document.update({"sd_scripts": checkout.version, **results.kohya_ext_commit()})
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
