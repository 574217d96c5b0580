"""Measure what a training step costs the host at full size: processor time, kernel launches, and waits for the GPU.

    python -m benchmarks.host_time [--only sdxl-lora] [--variants upstream,default] [--rounds 2] [--scratch FOLDER]
    python -m benchmarks.host_time --command "sdxl_train_network.py --preset 16gb" --gpu_memory 16 --variants upstream,default

Each family's LoRA script trains on a virtual GPU (see benchmarks/full_size.py), with and without gradient checkpointing, as
upstream does and with the extension; the variants alternate in each round. Launches and waits are exact. Seconds are the
processor time of a step: kernels take none, and neither does NVIDIA's driver, which the virtual GPU replaces. Other work on the
machine lengthens single steps, so the fastest step of each round counts. Rounds are added to those in the output file.
``--command`` measures another command line after its trial and its recordings, and writes no file. On a GPU of made-up speed
(VIRTUAL_GPU_LAUNCH_NS and VIRTUAL_GPU_KERNEL_NS), the trial chooses as on such a GPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import full_size, results
from benchmarks.full_size import Row
from kohya_ext.config import preset_files
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.units import GIB, read_card

OUTPUT = results.FOLDER / "host_time.json"

#: Variant -> options. Without patches the launcher runs upstream's script unchanged; a preset completes its arguments.
VARIANTS = {
    "upstream": ["--disable_patch", "*"],
    "default": [],
    "fused": ["--fused_operations"],
    "compiled": ["--selective_torch_compile"],
    "graphs": ["--cuda_graphs", "--cuda_graphs_always"],
}

#: Steps of a run that are not measured: the first creates optimizer state, the second searches paths in the graph.
FIRST_STEPS = 2
MEASURED_STEPS = 12
CARD = 80 * GIB

#: The same of a command line with a trial, which needs a long run.
FIRST_STEPS_AS_TYPED, STEPS_AS_TYPED = 30, 3000


def rows() -> Iterator[Row]:
    """Yield each family's LoRA with and without checkpointing."""
    for name in dict.fromkeys(family for family, _, _ in preset_files.shipped() if family.endswith("-lora")):
        for option in ("--gradient_checkpointing", "--no-gradient_checkpointing"):
            options = ["--preset", f"{name}/base", option, "--speed", "off"]
            yield Row(f"{name} {option}", preset_files.scripts(name)[0], options, CARD)


def as_typed(given: argparse.Namespace) -> Row:
    """Return the row of ``--command``."""
    script, *arguments = shlex.split(given.command)
    return Row(given.command, script, arguments, given.gpu_memory)


def add_round(cost: dict[str, Any], used: dict[str, Any], first: int) -> None:
    """Add a run's steps after the ``first`` ones, and the bytes that all of it has reserved, to the ``cost`` of a variant."""
    if "failed" in used:
        cost["failed"] = used["failed"]
        return
    steps = used["steps"][first:]
    cost.pop("failed", None)
    cost |= {name: min(step[name] for step in steps) for name in ("launches", "syncs")}
    cost |= {name: used[name] for name in ("reserved",) if name in used}  # the benchmark of peers does not count it
    cost.setdefault("rounds", []).append(round(min(step["processor_seconds"] for step in steps), 4))
    cost["seconds"] = min(cost["rounds"])


def main() -> int:
    """Measure all rows, and write the output file after each; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--only", default="", help="measure only rows whose name begins with this text")
    parser.add_argument("--variants", default="upstream,default,fused,compiled", help="variants to measure")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--command", metavar="WORDS", help="measure only this script and its arguments, without models and images"
    )
    parser.add_argument("--gpu_memory", default="80GiB", metavar="SIZE", type=read_card, help="the GPU's size for --command")
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    exists = given.output.is_file() and not given.command
    document = json.loads(given.output.read_text(encoding="utf-8")) if exists else {"rows": {}}
    first = FIRST_STEPS_AS_TYPED if given.command else FIRST_STEPS
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for row in [as_typed(given)] if given.command else rows():
            if not row.name.startswith(given.only):
                continue
            steps = STEPS_AS_TYPED if given.command else first + MEASURED_STEPS + 1
            arguments, config = full_size.training_arguments(row, checkout, scratch, steps)
            count = full_size.passes(config, first + MEASURED_STEPS)
            tokens = full_size.tokens(config)
            measured: dict[str, Any] = document["rows"].setdefault(
                row.name, {"arguments": " ".join([row.script, *row.arguments])}
            )
            for _ in range(given.rounds):
                for name in given.variants.split(","):
                    used = full_size.run(row, checkout, scratch, given, [*arguments, *VARIANTS[name]], count, tokens)
                    add_round(measured.setdefault(name, {}), used, first)
                    print(f"{row.name} {name}: {measured[name]}", file=sys.stderr, flush=True)
            if given.command:
                continue
            document |= {"sd_scripts": checkout.version, **results.kohya_ext_commit()}
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in cost for row in document["rows"].values() for cost in row.values() if isinstance(cost, dict)))


if __name__ == "__main__":
    sys.exit(main())
