"""Compare the losses of 200 steps of a tiny SDXL fine-tune: weights in float32 and bf16, with gradient release and without.

    python -m benchmarks.fine_tune_losses [--output FILE]

All variants train sdxl_train.py with AdamW on the same images, with the same noise and timesteps, in bf16 autocast on the CPU,
so their losses are compared step by step. Float32 weights with default patches are the reference, because upstream's own
checkpointing of the U-Net loses gradients. What a variant differs from it by more than twice the standard error of the mean
difference, it lost to rounding or to clipping. The same for the trained weights: their distance from the reference's, as a
share of the distance that training has moved those. It contains the rounding of the first weights to bf16. A variant takes one
to two minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.processes import last_line
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.tiny import arguments, checkpoints, dataset, environment

OUTPUT = results.FOLDER / "fine_tune_losses.json"
SCRIPT = "sdxl_train.py"
UNET = "model.diffusion_model."
STEPS = 200
COMMON = ["--mixed_precision", "bf16", "--max_train_steps", str(STEPS), "--learning_rate", "1e-5", "--save_precision", "float"]
UNCLIPPED, CLIPPED = ["--max_grad_norm", "0"], ["--max_grad_norm", "0.1"]
RELEASE = ["--gradient_release"]

REFERENCE = "float32 weights"
CLIPPED_REFERENCE = "float32 weights, clipped"
VARIANTS = {
    REFERENCE: UNCLIPPED,
    "float32 weights, gradient release": [*UNCLIPPED, *RELEASE],
    "bf16 weights": [*UNCLIPPED, "--full_bf16"],
    "bf16 weights, gradient release": [*UNCLIPPED, "--full_bf16", *RELEASE],
    "bf16 weights, gradient release, master weights": [*UNCLIPPED, "--full_bf16", *RELEASE, "--master_weights"],
    CLIPPED_REFERENCE: CLIPPED,
    "float32 weights, clipped, gradient release": [*CLIPPED, *RELEASE],
}


class Trained(NamedTuple):
    """What a variant has trained."""

    losses: list[float]
    """Of each step."""
    model: Path
    """The file, in float32."""
    start: Path
    """The model that it began with."""


def train(name: str, checkout: Checkout, scratch: Path) -> Trained:
    """Train a variant. Raises RuntimeError if the script fails."""
    models = checkpoints.write(arguments.SCRIPTS[SCRIPT][0], checkout.path, scratch / "models")
    if not (images := scratch / "images").is_dir():
        dataset.write(images, 4, 128)
    output, values, log = scratch / name, scratch / f"{name}.json", scratch / f"{name}.txt"
    words = [*arguments.training_arguments(SCRIPT, models, images, output), *COMMON, *VARIANTS[name]]
    variables = {
        **environment.variables(models.tokenizers),
        "PYTHONPATH": environment.python_path(environment.SITE, results.ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "benchmarks.precision_worker", str(values), "--sd-scripts", str(checkout.path), SCRIPT]
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run([*command, *words], stdout=file, stderr=subprocess.STDOUT, env=os.environ | variables).returncode
    if code:
        raise RuntimeError(f"{name}: exit code {code}: {last_line(log)[:500]}")
    measured: list[float] = json.loads(values.read_text(encoding="utf-8"))
    return Trained(measured, next(output.glob("*.safetensors")), models.files["pretrained_model_name_or_path"])


def apart(trained: Trained, reference: Trained) -> float:
    """Return the distance of the U-Net's weights from the reference's, as a share of what training has moved those."""
    from safetensors.torch import load_file

    ours, theirs, start = map(load_file, (trained.model, reference.model, reference.start))
    names = [name for name in start if name.startswith(UNET)]
    between, moved = (
        sum(float((tensors[name].double() - theirs[name].double()).square().sum()) for name in names)
        for tensors in (ours, start)
    )
    return math.sqrt(between / moved)


def compared(measured: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Return the mean loss, its difference from the reference's, and the standard error of that difference."""
    differences = [ours - theirs for ours, theirs in zip(measured, reference, strict=True)]
    return {
        "mean_loss": statistics.fmean(measured),
        "mean_difference": statistics.fmean(differences),
        "standard_error": statistics.stdev(differences) / math.sqrt(len(differences)),
    }


def _row(trained: Trained, reference: Trained) -> dict[str, Any]:
    losses = trained.losses, reference.losses
    return {**compared(*losses), "equal": losses[0] == losses[1], "apart": apart(trained, reference)}


def main() -> int:
    """Train all variants and write how their losses compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    checkout = find_or_fetch(given.sd_scripts)
    trained: dict[str, Trained] = {}
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in VARIANTS:
            trained[name] = train(name, checkout, Path(temporary))
            rows[name] = _row(trained[name], trained[CLIPPED_REFERENCE if "clipped" in name else REFERENCE])
            print(f"{name}: {rows[name]}", file=sys.stderr, flush=True)
    document = {"rows": rows, "steps": STEPS, **results.circumstances(checkout)}
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
