"""Measure training steps at full size on this machine's GPU: seconds, kernels, losses and memory.

    python -m benchmarks.gpu_time [--only "sdxl-lora --gr.* (upstream|default)"] [--rounds 2] [--minutes 9] [--scratch FOLDER]

Each family's LoRA script trains with and without gradient checkpointing, as upstream does and with the extension, in turn. The
checkpoints have the sizes of the published ones and random weights (see sparse_checkpoints.py). A scratch folder on a RAM disk
saves time; FLUX takes 34 GB of it. Rows of presets, such as "sdxl-lora/16gb", train as a user types it, from the beginning of a
long run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import full_size, host_time, results
from benchmarks.full_size import Row
from benchmarks.processes import last_line
from kohya_ext.config import preset_files
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.tiny import environment

OUTPUT = results.FOLDER / "gpu_time.json"

#: Options of a variant; see host_time.py.
VARIANTS = {
    "upstream": host_time.VARIANTS["upstream"],
    "default": host_time.VARIANTS["default"],
    "graphs": ["--cuda_graphs", "--cuda_graphs_always"],
    "fused": host_time.VARIANTS["fused"],
    "graphs-fused": ["--cuda_graphs", "--cuda_graphs_always", "--fused_operations"],
    "typed-graphs": ["--cuda_graphs"],
    "typed-graphs-fused": ["--cuda_graphs", "--fused_operations"],
    "auto": ["--speed", "auto"],
    "compiled": host_time.VARIANTS["compiled"],
    "compiled-graphs": ["--selective_torch_compile", "--cuda_graphs", "--cuda_graphs_always"],
    "compiled-graphs-fused": ["--selective_torch_compile", "--cuda_graphs", "--cuda_graphs_always", "--fused_operations"],
    "int8-graphs": ["--base_precision", "int8", "--cuda_graphs", "--cuda_graphs_always"],
    "fp8-graphs": ["--base_precision", "fp8", "--cuda_graphs", "--cuda_graphs_always"],
    "int8-graphs-fused": ["--base_precision", "int8", "--cuda_graphs", "--cuda_graphs_always", "--fused_operations"],
    "fp8-graphs-fused": ["--base_precision", "fp8", "--cuda_graphs", "--cuda_graphs_always", "--fused_operations"],
    "compiled-int8-graphs": ["--base_precision", "int8", "--selective_torch_compile", "--cuda_graphs", "--cuda_graphs_always"],
    "compiled-fp8-graphs": ["--base_precision", "fp8", "--selective_torch_compile", "--cuda_graphs", "--cuda_graphs_always"],
}
FIRST_STEPS = 8
MEASURED_STEPS = 12
PROFILED_STEPS = 2

#: Presets that run as a user types them; the variants for them; and the steps of the whole run, which decide whether a trial is
#: worth its time, and those before it is measured.
PRESETS = ("sdxl-lora/16gb", "flux-lora/32gb")
TYPED = ("upstream", "typed-graphs", "typed-graphs-fused", "auto")
WHOLE_RUN, FIRST_OF_TYPED = 3000, 40


@dataclass(frozen=True)
class Job:
    """A variant of a row to train."""

    row: Row
    variant: str
    profiled: bool

    @property
    def name(self) -> str:
        """The name of its results."""
        return f"{self.row.name} {self.variant}"


def jobs(given: argparse.Namespace) -> Iterator[list[Job]]:
    """Yield the jobs of each row: all variants in turn, in each round. The first round is profiled."""
    for row in (*host_time.rows(), *(Row(name, _script(name), ["--preset", name], host_time.CARD) for name in PRESETS)):
        variants = TYPED if row.name in PRESETS else [name for name in VARIANTS if name not in TYPED or name == "upstream"]
        chosen = [name for name in variants if re.search(given.only, f"{row.name} {name}")]
        if chosen:
            yield [Job(row, name, turn == 0) for turn in range(given.rounds) for name in chosen]


def _script(preset: str) -> str:
    return preset_files.scripts(preset.partition("/")[0])[0]


def train(job: Job, arguments: list[str], checkout: Checkout, scratch: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Return a job's measurements and the SHA-256 of its trained weights; with ``--resume`` those of a resumed run, too."""
    output = scratch / "output"
    halfway = int(arguments[arguments.index("--max_train_steps") + 1]) // 2
    saving = ["--save_state", "--save_every_n_steps", str(halfway)] if given.resume else []
    values = _run(job, [*arguments, *saving], output, checkout, scratch, given)
    state = output / f"trained-step{halfway:08d}-state"
    if given.resume and "failed" not in values:
        again = _run(job, [*arguments, "--resume", str(state)], scratch / "resumed", checkout, scratch, given)
        values |= {f"resumed_{name}": again[name] for name in ("weights", "losses") if name in again}
        if "failed" in again:
            values["failed"] = f"resumed: {again['failed']}"
    return values


def _run(
    job: Job, arguments: list[str], output: Path, checkout: Checkout, scratch: Path, given: argparse.Namespace
) -> dict[str, Any]:
    result, log = scratch / "result.json", scratch / "log.txt"
    result.unlink(missing_ok=True)
    shutil.rmtree(output, ignore_errors=True)
    specification = {
        "result": str(result),
        "first": given.first if job.row.name not in PRESETS or job.variant == "upstream" else FIRST_OF_TYPED,
        "ends": job.row.name in PRESETS,
        "measured": given.measured,
        "profiled": PROFILED_STEPS if job.profiled and not given.deterministic else 0,
        "deterministic": given.deterministic,
    }
    variables = environment.variables(scratch / "models" / "tokenizers") | {
        "PYTHONPATH": environment.python_path(results.ROOT),
        "KOHYA_EXT_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "compiled"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic, and the default size
        "TQDM_DISABLE": "1",
    }
    del variables["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", "benchmarks.gpu_worker", json.dumps(specification), "--sd-scripts", str(checkout.path)]
    outputs = ["--output_dir", str(output), "--output_name", "trained", "--no_metadata"]
    failed = None
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                [*command, job.row.script, *arguments, *outputs, *VARIANTS[job.variant]],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=scratch,
                env=os.environ | variables,
                timeout=min(given.patience, given.end + 30 - time.monotonic()),
            ).returncode
        except subprocess.TimeoutExpired as error:
            failed = f"ended after {error.timeout:.0f} s"
        else:
            failed = f"exit code {code}: {last_line(log)}" if code else None
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
        shutil.copy(log, given.logs / f"{re.sub('[^a-z0-9]+', '-', job.name)}.txt")
    values: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    weights = output / "trained.safetensors"
    if weights.exists():
        values["weights"] = weights_hash(weights)
    return values | ({} if failed is None else {"failed": failed})


def weights_hash(path: Path) -> str:
    """Return the SHA-256 of a safetensors file's tensors, without its header."""
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        return hashlib.sha256(file.read()).hexdigest()


def measured(document: dict[str, Any], turn: list[Job], checkout: Checkout, scratch: Path, given: argparse.Namespace) -> bool:
    """Measure the jobs of a row, and write the output file after each; return whether one failed."""
    failed = False
    steps = WHOLE_RUN if turn[0].row.name in PRESETS else given.first + given.measured + PROFILED_STEPS + 1
    arguments, _ = full_size.training_arguments(turn[0].row, checkout, scratch, steps, random=True)
    for job in turn:
        if time.monotonic() > given.end:
            break
        result = train(job, arguments, checkout, scratch, given)
        failed |= "failed" in result
        about = results.circumstances(checkout, **result.pop("device", {}))
        document["rows"].setdefault(job.name, []).append({"commit": about["commits"]["kohya_ext"], **result})
        document |= {"machine": about["machine"], "versions": about["versions"], "sd_scripts": checkout.version}
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        busy = result.get("profile", {}).get("busy_seconds")
        parts = (
            result.get("seconds"),
            busy,
            result.get("allocated"),
            result.get("reserved"),
            result.get("until_first_backward"),
        )
        hashes = " ".join(result.get(name, "")[:8] for name in ("weights", "resumed_weights"))
        print(f"{job.name}: {parts} {hashes} {result.get('failed', '')}", file=sys.stderr, flush=True)
    return failed


def main() -> int:
    """Measure the chosen rows; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", help="regular expression: measure only runs whose name contains it")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each variant")
    parser.add_argument("--first", type=int, default=FIRST_STEPS, help="steps that are not measured")
    parser.add_argument("--measured", type=int, default=MEASURED_STEPS, help="steps that are measured")
    parser.add_argument("--deterministic", action="store_true", help="compare weights: deterministic kernels, no profile")
    parser.add_argument("--resume", action="store_true", help="train again from the state in the middle of each run")
    parser.add_argument("--minutes", type=float, default=600, help="start no run after this time")
    parser.add_argument("--patience", type=float, default=300, help="seconds after which a run is ended")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints, images and outputs")
    parser.add_argument("--logs", type=Path, help="folder for the logs of the runs")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    given.end = time.monotonic() + 60 * given.minutes
    checkout = find_or_fetch(given.sd_scripts)
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for turn in jobs(given):
            if time.monotonic() < given.end:
                failed |= measured(document, turn, checkout, scratch, given)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
