"""Compare the estimate of a step with its allocations on real tensors, measured by torch's profiler.

    python -m benchmarks.vram_accuracy --sd-scripts FOLDER [--width 96] [--size 256] [--output NAME.json]

A reduced SDXL on the CPU, for LoRA and full fine-tuning, and LoRAs of a reduced SD1.5 and Lumina 2, with and without
checkpointing. The estimate is made from fake tensors as always; the measured figure is the sum of the allocations and frees
that the CPU allocator reports to torch.profiler while the step runs on real ones. Weights and optimizer state
have known sizes and are added to both, so the error above the weights is the most informative figure.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, measurement
from kohya_ext.estimate.events import Event, Kind, peak
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.sdscripts.introspect import importable
from kohya_ext.tiny import shrink

_COMMON = "--mixed_precision bf16 --sdpa --cache_latents"
CACHED = "--cache_text_encoder_outputs"
FULL = f"sdxl_train.py {_COMMON} {CACHED} --learning_rate 1e-5 --optimizer_type"
ADAFACTOR = "Adafactor --optimizer_args relative_step=False"
LORA = f"{_COMMON} --network_dim 16 --network_train_unet_only --optimizer_type AdamW --network_module networks.lora"

#: Name -> script and arguments.
CASES = {
    "lora": f"sdxl_train_network.py {CACHED} {LORA}",
    "full, fp32 weights, AdamW": f"{FULL} AdamW",
    "full, bf16 weights, Adafactor": f"{FULL} {ADAFACTOR} --full_bf16",
    "full, bf16 weights, AdamW in 4 groups": f"{FULL} AdamW --full_bf16 --fused_optimizer_groups 4",
    "full, fp32 weights, Adafactor fused": f"{FULL} {ADAFACTOR} --fused_backward_pass",
    "SD1.5 lora": f"train_network.py {LORA}",
    "Lumina lora": f"lumina_train_network.py {CACHED} {LORA}_lumina --model_prediction_type raw",
}

OPTIONS: dict[str, list[str]] = {
    "": [], ", checkpointing": ["--gradient_checkpointing"], ", fused operations": ["--fused_operations"]
}  # fmt: skip


def compare(checkout: Checkout, script: str, argv: list[str]) -> dict[str, Any]:
    """Return both peaks of one command line in bytes, and the error of the estimate in percent of the measured peak."""
    from kohya_ext.estimate.step import configure, measure

    command = CommandLine(checkout.script(script), argv, {})
    choices, arguments, trainer = measurement.read(checkout, command)
    configure(choices, arguments, trainer)
    with measurement.patched(checkout, measurement.eager(command.settings)):
        log = measure(choices, arguments, trainer)
    estimated = _peak(log.events, log.kinds)
    before = sum(event.bytes for event in log.events[: log.start])
    with measurement.patched(checkout, command.settings):
        above, tensors = _measured(choices, arguments, trainer)
    return {
        "before the step": before,
        "estimated": estimated,
        "measured": before + above,
        "measured, tensors alone": before + tensors,
        "error_percent": round(100 * (estimated / (before + above) - 1), 3),
        "error_percent_above_the_weights": round(100 * ((estimated - before) / above - 1), 3),
    }


def _measured(choices: MemoryConfig, arguments: argparse.Namespace, trainer: Any) -> tuple[int, int]:
    """Return the peak of real allocations in one step above those before it, in bytes, and the peak of its tensors.

    The difference is the workspace of CPU kernels, which has no counterpart on a GPU.
    """
    import torch

    from benchmarks.profiling import peak_of
    from kohya_ext.estimate.autocast import cuda_rules
    from kohya_ext.estimate.linear import bias_in_place
    from kohya_ext.estimate.step import allocate_resident, prepare, run_step
    from kohya_ext.estimate.tracker import Tracker

    torch.manual_seed(1)
    with cuda_rules(), bias_in_place():
        training = prepare(choices, arguments, trainer)
        unused = Tracker()  # never entered: it sees no operator
        allocate_resident(training, unused)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            run_step(training, unused)
        most = peak_of(profile)
        tracker = Tracker()
        with tracker:
            for module, kind in training.resident:
                tracker.mark((*module.parameters(), *module.buffers()), kind)
            states = (value for state in training.optimizer.state.values() for value in state.values())
            tracker.mark((value for value in states if isinstance(value, torch.Tensor)), Kind.OPTIMIZER_STATE)
            start = len(tracker.events)
            run_step(training, tracker)
    return most, _peak(tracker.events[start:], tracker.kinds)


def _peak(events: Sequence[Event], kinds: Sequence[Kind]) -> int:
    """Return the peak of a log in bytes, without cuBLAS's workspaces, which a CPU does not have."""
    return peak([event for event in events if kinds[event.storage] is not Kind.WORKSPACE], kinds).bytes


def write(report: dict[str, Any], file: Path) -> None:
    """Write a report as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Compare every case; print and write JSON; return 1 when an error exceeds ``--limit`` percent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--width", type=int, default=96, help="channels of the U-Net's first level; SDXL has 320")
    parser.add_argument("--size", type=int, default=512, help="pixels along a side")
    parser.add_argument("--only", default="", help="run only cases whose name begins with this text")
    parser.add_argument("--limit", type=float, default=5.0, help="largest error above the weights, in percent")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    shrink.UNET_WIDTH = given.width
    shrink.install()
    checkout = find_or_fetch(given.sd_scripts)
    cases = {}
    for name, case in CASES.items():
        for suffix, more in OPTIONS.items():
            if f"{name}{suffix}".startswith(given.only):
                script, *argv = [*case.split(), *more, "--resolution", str(given.size)]
                with importable(checkout):
                    cases[f"{name}{suffix}"] = compare(checkout, script, argv)
                print(f"{name}{suffix}: {cases[f'{name}{suffix}']}", file=sys.stderr, flush=True)
    more = f" --only '{given.only}'" if given.only else ""
    report = {
        "what": f"reduced models, U-Nets of {given.width} channels, {given.size}x{given.size} pixels, CPU; bytes and percent",
        "command": f"python -m benchmarks.vram_accuracy --width {given.width} --size {given.size}{more}",
        "sd_scripts": checkout.version,
        "torch": cache.version("torch"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "cases": cases,
    }
    if given.output is not None:
        write(report, given.output)
    print(json.dumps(report, indent=1))
    return int(any(abs(case["error_percent_above_the_weights"]) > given.limit for case in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
