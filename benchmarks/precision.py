"""Compare the losses of a full-size SDXL LoRA on the CPU: in bf16 as upstream, with patches, and in float32.

    python -m benchmarks.precision [--only compiled] [--scratch FOLDER]

All variants train the same steps from the same random weights at 256x256 pixels. The distance from float32 shows what a variant
loses to rounding. It takes about a quarter of an hour and 15 GB of memory on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import full_size, host_time, results
from benchmarks.processes import last_line
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.tiny import environment

OUTPUT = results.FOLDER / "precision.json"
STEPS = 4
ROW = "sdxl-lora --gradient_checkpointing"
SMALL = ["--resolution", "256,256", "--min_bucket_reso", "64", "--max_bucket_reso", "512"]

VARIANTS = {**host_time.VARIANTS, "float32": [*host_time.VARIANTS["upstream"], "--mixed_precision", "no"]}


def losses(name: str, checkout: Checkout, scratch: Path) -> list[float]:
    """Train a variant and return the loss of each step. Raises RuntimeError if the script fails."""
    row = next(row for row in host_time.rows() if row.name == ROW)
    row = replace(row, arguments=[*row.arguments, *SMALL])
    arguments, _ = full_size.training_arguments(row, checkout, scratch, STEPS, random=True)
    values, log = scratch / f"{name}.json", scratch / f"{name}.txt"
    variables = environment.variables(scratch / "models" / "tokenizers") | {
        "PYTHONPATH": environment.python_path(results.ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "TQDM_DISABLE": "1",
    }
    command = [sys.executable, "-m", "benchmarks.precision_worker", str(values), "--sd-scripts", str(checkout.path)]
    outputs = ["--output_dir", str(scratch / name), "--output_name", "trained", "--no_metadata"]
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            [*command, row.script, *arguments, *outputs, *VARIANTS[name]],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=os.environ | variables,
        ).returncode
    if code:
        raise RuntimeError(f"{name}: exit code {code}: {last_line(log)}")
    measured: list[float] = json.loads(values.read_text(encoding="utf-8"))
    return measured


def main() -> int:
    """Train the chosen variants and write their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--only", choices=VARIANTS, help="train this variant only")
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoint, images and outputs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    document: dict[str, Any] = (
        json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"losses": {}}
    )
    with tempfile.TemporaryDirectory() as temporary:
        for name in VARIANTS if given.only is None else [given.only]:
            document["losses"][name] = losses(name, checkout, given.scratch or Path(temporary))
            document |= results.circumstances(checkout)
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(f"{name}: {document['losses'][name]}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
