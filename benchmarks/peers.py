"""Measure what a training step of other trainers costs the host at full size, as host_time.py does for sd-scripts.

    python -m benchmarks.peers --diffusers FOLDER [--only diffusers/flux] [--rounds 2] [--scratch FOLDER]

A folder is a checkout of the trainer, at a version that fits the installed packages; trainers without a folder are left out.
Their unchanged scripts train a LoRA of rank 16 on a virtual GPU (see benchmarks/full_size.py) with batch size 1, 1024x1024,
bf16 and AdamW, with and without gradient checkpointing. Launches and waits are exact. Seconds are the processor time of a step:
kernels take none, and neither does NVIDIA's driver, which the virtual GPU replaces. Other work on the machine lengthens single
steps, so the fastest step of each round counts. Rounds are added to those in the output file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import diffusers_folders, full_size, results
from kohya_ext.tiny import environment
from kohya_ext.units import GIB

OUTPUT = results.FOLDER / "peers.json"

#: Steps of a run that are not measured: the first creates optimizer state, the second searches paths in the graph.
FIRST_STEPS = 2
MEASURED_STEPS = 12
IMAGES = FIRST_STEPS + MEASURED_STEPS + 2
CARD = 160 * GIB
RESOLUTION = 1024
CAPTION = "a photo of a sks dog"

COMMON = [
    *("--resolution", str(RESOLUTION), "--train_batch_size", "1", "--mixed_precision", "bf16", "--rank", "16"),
    *("--learning_rate", "1e-4", "--max_train_steps", "1000", "--checkpointing_steps", "1000", "--seed", "1"),
]
DREAMBOOTH = ["--instance_prompt", CAPTION, *COMMON]


@dataclass(frozen=True)
class Row:
    """A trainer's command line, without its models, images and output."""

    name: str
    peer: str
    model: str
    script: str
    arguments: list[str]


def rows() -> Iterator[Row]:
    """Yield each trainer's scripts with and without checkpointing."""
    for checkpointing in (["--gradient_checkpointing"], []):
        suffix = " ".join(["", *checkpointing])
        script = "examples/text_to_image/train_text_to_image_lora_sdxl.py"
        yield Row(f"diffusers/sdxl text to image{suffix}", "diffusers", "sdxl", script, [*COMMON, *checkpointing])
        script = "examples/dreambooth/train_dreambooth_lora_sdxl.py"
        yield Row(f"diffusers/sdxl dreambooth{suffix}", "diffusers", "sdxl", script, [*DREAMBOOTH, *checkpointing])
        script = "examples/dreambooth/train_dreambooth_lora_flux.py"
        cached = [*DREAMBOOTH, "--optimizer", "AdamW", "--cache_latents", *checkpointing]
        yield Row(f"diffusers/flux dreambooth{suffix}", "diffusers", "flux", script, cached)


def paths(row: Row, scratch: Path) -> list[str]:
    """Write a row's model and images to ``scratch``, and return the arguments that name them."""
    model = scratch / "models" / f"diffusers-{row.model}"
    if not model.exists():
        diffusers_folders.WRITERS[row.model](model)
    images = scratch / "images"
    write_images(images)
    option = "--train_data_dir" if "--instance_prompt" not in row.arguments else "--instance_data_dir"
    words = ["--pretrained_model_name_or_path", str(model), option, str(images), "--output_dir", str(scratch / "output")]
    if option == "--train_data_dir":
        captions = (json.dumps({"file_name": file.name, "text": CAPTION}) for file in images.iterdir())
        (images / "metadata.jsonl").write_text("\n".join(captions) + "\n", encoding="utf-8")
    return words


def write_images(folder: Path) -> None:
    """Write an image for each step, so that a run is one epoch. Other images are deleted."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for index in range(IMAGES):
        Image.effect_noise((RESOLUTION, RESOLUTION), 64).convert("RGB").save(folder / f"{index}.png", compress_level=1)


def run(row: Row, checkout: Path, scratch: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run a row's script once, and return the worker's result."""
    passes = FIRST_STEPS + MEASURED_STEPS
    words = [str(checkout / row.script), *row.arguments, *paths(row, scratch)]
    variables = environment.variables(scratch / "models" / "tokenizers") | {"HF_HOME": str(scratch / "cache")}
    return full_size.run_worker(given, scratch, CARD, ["benchmarks.peers_worker", str(passes)], words, variables, passes)


def add_round(cost: dict[str, Any], used: dict[str, Any]) -> None:
    """Add a run's measured steps to a row's ``cost``; a failed run replaces it."""
    if "failed" in used:
        cost.clear()
        cost["failed"] = used["failed"]
        return
    steps = used["steps"][FIRST_STEPS:]
    cost.pop("failed", None)
    cost |= {"trained": used["trained"], **{name: min(step[name] for step in steps) for name in ("launches", "syncs")}}
    cost.setdefault("rounds", []).append(round(min(step["processor_seconds"] for step in steps), 4))
    cost["seconds"] = min(cost["rounds"])


def version(checkout: Path) -> str:
    """Return the nearest tag of a checkout, or its commit."""
    words = ["git", "-C", str(checkout), "describe", "--tags", "--always", "--dirty"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Measure the rows of the trainers that are given, and write the output file after each; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    parser.add_argument("--diffusers", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", help="measure only rows whose name begins with this text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for row in rows():
            checkout = getattr(given, row.peer)
            if checkout is None or not row.name.startswith(given.only):
                continue
            cost = document["rows"].setdefault(row.name, {"arguments": " ".join([row.script, *row.arguments])})
            for _ in range(given.rounds):
                add_round(cost, run(row, checkout, scratch, given))
                print(f"{row.name}: {cost}", file=sys.stderr, flush=True)
            document |= results.kohya_ext_commit()
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in cost for cost in document["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
