"""Compare the estimates with a CUDA GPU, and fit the constants that need one: context, workspaces, fragmentation.

    python -m benchmarks.vram_calibration [--sd-scripts FOLDER] [--output benchmarks/results/vram_calibration.json]

Every case is a command line at full size with random weights, in a separate process. It is estimated, then three steps run
on the GPU, measured by torch.cuda.max_memory_allocated, max_memory_reserved and nvidia-smi. Cases in the output file are not
run again, so an interrupted run can be continued. A case that runs out of memory is recorded as such. Nothing else should use
the GPU. ``--device cpu --width 32 --size 128`` runs the same code on a reduced SDXL without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from benchmarks.vram_accuracy import ADAFACTOR, CACHED, FULL, LORA, write
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, measurement
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.sdscripts.introspect import importable
from kohya_ext.tiny import shrink

_CHECKPOINTING = "--gradient_checkpointing"

CASES = (
    f"sdxl_train_network.py {CACHED} {LORA} {_CHECKPOINTING}",
    f"sdxl_train_network.py {CACHED} {LORA} {_CHECKPOINTING} --train_batch_size 4",
    f"sdxl_train_network.py {CACHED} {LORA}",
    f"{FULL} {ADAFACTOR} {_CHECKPOINTING} --fused_backward_pass --full_bf16",
    f"{FULL} {ADAFACTOR} {_CHECKPOINTING} --fused_backward_pass",
    f"{FULL} AdamW8bit {_CHECKPOINTING} --full_bf16",
    f"{FULL} AdamW {_CHECKPOINTING} --full_bf16",
    f"train_network.py {LORA} {_CHECKPOINTING}",
    f"lumina_train_network.py {CACHED} {LORA}_lumina {_CHECKPOINTING}",
    f"flux_train_network.py {CACHED} {LORA}_flux {_CHECKPOINTING}",
    f"flux_train_network.py {CACHED} {LORA}_flux {_CHECKPOINTING} --fp8_base",
)


def measure(case: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return one case's estimate and, on a GPU, its allocated and reserved bytes."""
    import torch

    from kohya_ext.estimate.step import allocate_resident, configure, prepare, run_step
    from kohya_ext.estimate.tracker import Tracker

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if given.width:
        shrink.UNET_WIDTH = given.width
        shrink.install()
    checkout = find_or_fetch(given.sd_scripts)
    script, *argv = [*case.split(), "--resolution", str(given.size)]
    command = CommandLine(checkout.script(script), argv, {})
    estimated = measurement.measure(checkout, command)
    row: dict[str, Any] = {"estimated": {"allocated": estimated.allocated, "reserved": estimated.reserved}}
    cuda = given.device == "cuda"
    before = _used() if cuda else None
    with importable(checkout), measurement.patched(checkout, measurement.eager(command.settings)):
        choices, arguments, trainer = measurement.read(checkout, command)
        configure(choices, arguments, trainer)
        torch.set_default_device(given.device)
        try:
            training = prepare(choices, arguments, trainer)
            resident = [module for module, _ in training.resident]
            if training.models.vae not in resident:
                training.models.vae = None
            training.models.text_encoders = [model for model in training.models.text_encoders if model in resident]
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            unused = Tracker()  # never entered: it sees no operator
            allocate_resident(training, unused)
            for _ in range(3):
                run_step(training, unused)
        except torch.OutOfMemoryError as error:
            return {**row, "out_of_memory": str(error).splitlines()[0]}
    if cuda:
        torch.cuda.synchronize()
        row["measured"] = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "context": _used() - before - torch.cuda.memory_reserved(),
        }
        row["card"] = torch.cuda.get_device_name()
    return row


def _used() -> int:
    """Return the bytes in use on the first GPU, all processes together."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20


def fit(rows: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the constants that the measured rows suggest; None without rows."""
    measured = [row for row in rows.values() if "measured" in row]
    if not measured:
        return None

    def ratios(what: str) -> list[float]:
        return [row["measured"][what] / row["estimated"][what] for row in measured]

    return {
        "context_bytes": round(statistics.median(row["measured"]["context"] for row in measured)),
        "context_bytes_assumed_so_far": CONTEXT_BYTES,
        "allocated_measured_over_estimated": {"median": statistics.median(ratios("allocated")), "all": ratios("allocated")},
        "reserved_measured_over_estimated": {"median": statistics.median(ratios("reserved")), "all": ratios("reserved")},
    }


def main() -> int:
    """Run the cases that the output file lacks; write it after every case. Return 1 when a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", type=int, default=1024, help="pixels along a side")
    parser.add_argument("--width", type=int, help="reduce the models, SDXL's U-Net to this many channels at its first level")
    parser.add_argument("--only", default="", help="run only cases that begin with this text")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "vram_calibration.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print("ROW" + json.dumps(measure(given.case, given)))
        return 0
    report = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {"rows": {}}
    for case in (case for case in CASES if case.startswith(given.only) and "measured" not in report["rows"].get(case, {})):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.vram_calibration", *sys.argv[1:], "--case", case],
            stdout=subprocess.PIPE,
            text=True,
        )
        row = done.stdout.rpartition("ROW")[2]
        report["rows"][case] = json.loads(row) if done.returncode == 0 else {"failed": done.returncode}
        report |= {
            "what": "bytes; estimates and measurements, one process per case",
            "torch": cache.version("torch"),
            "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "size": given.size,
            "fit": fit(report["rows"]),
        }
        write(report, given.output)
        print(case, report["rows"][case], sep="\n  ", flush=True)
    print(json.dumps(report.get("fit"), indent=1))
    return int(any("failed" in row for row in report["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
