"""Measure what a training step of other trainers costs the host at full size, as host_time.py does for sd-scripts.

    python -m benchmarks.peers --diffusers FOLDER [--only diffusers/flux] [--rounds 2] [--scratch FOLDER]
    python -m benchmarks.peers --musubi-tuner FOLDER --onetrainer FOLDER

A folder is a git checkout of the trainer, at a version that fits the installed packages; trainers without one are left out.
Their unchanged scripts train a LoRA of rank 16 on a virtual GPU (see benchmarks/full_size.py) with batch size 1, 1024x1024,
bf16 and AdamW, with and without gradient checkpointing. Launches and waits are exact. Seconds are the processor time of a step:
kernels take none, and neither does NVIDIA's driver, which the virtual GPU replaces. Other work on the machine lengthens single
steps, so the fastest step of each round counts. Rounds are added to those in the output file.

Besides what sd-scripts needs, diffusers' scripts import peft and datasets, and musubi-tuner av and easydict. OneTrainer needs
other versions of diffusers and transformers, so it runs in an environment of its own.
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

from benchmarks import diffusers_folders, full_size, results, sparse_checkpoints
from benchmarks.host_time import FIRST_STEPS, MEASURED_STEPS, add_round
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import cache, memory_config
from kohya_ext.sdscripts.checkouts import find_or_fetch
from kohya_ext.tiny import environment, tokenizers
from kohya_ext.units import GIB

OUTPUT = results.FOLDER / "peers.json"

IMAGES = FIRST_STEPS + MEASURED_STEPS + 2
CARD = 160 * GIB
RESOLUTION = 1024
CAPTION = "a photo of a sks dog"
PACKAGES = ("torch", "accelerate", "diffusers", "transformers", "peft")

DIFFUSERS = [
    *("--resolution", str(RESOLUTION), "--train_batch_size", "1", "--mixed_precision", "bf16", "--rank", "16"),
    *("--learning_rate", "1e-4", "--max_train_steps", "1000", "--checkpointing_steps", "1000", "--seed", "1"),
]
MUSUBI = [
    *("--sdpa", "--mixed_precision", "bf16", "--timestep_sampling", "flux_shift", "--weighting_scheme", "none"),
    *("--network_module", "networks.lora_flux", "--network_dim", "16", "--network_alpha", "16", "--optimizer_type", "AdamW"),
    *("--learning_rate", "1e-4", "--max_train_steps", "1000", "--max_data_loader_n_workers", "0", "--seed", "1"),
]

#: OneTrainer's presets with the settings of the others; fused is the choice of its user interface for AdamW.
ONETRAINER = [
    *("resolution=1024", "batch_size=1", "epochs=1", "train_dtype=BFLOAT_16", "text_encoder.weight_dtype=BFLOAT_16"),
    *("text_encoder_2.weight_dtype=BFLOAT_16", "lora_rank=16", "lora_alpha=16", "learning_rate=1e-4", "tensorboard=false"),
    *("optimizer.optimizer=ADAMW", "optimizer.fused=true", "optimizer.stochastic_rounding=false"),
]
PRESETS = {"sdxl": "training_presets/SDXL/#sdxl 1.0 LoRA.json", "flux": "training_presets/Flux Dev.1/#flux LoRA.json"}

#: musubi-tuner's dataset: one image, which is also the control image.
DATASET = """[general]
resolution = [{size}, {size}]
caption_extension = ".txt"
batch_size = 1

[[datasets]]
image_directory = "{images}"
control_directory = "{images}"
cache_directory = "{cache}"
num_repeats = {repeats}
"""


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
    prompt = ["--instance_prompt", CAPTION]
    scripts = [
        ("sdxl text to image", "sdxl", "text_to_image/train_text_to_image_lora_sdxl.py", []),
        ("sdxl dreambooth", "sdxl", "dreambooth/train_dreambooth_lora_sdxl.py", prompt),
        ("flux dreambooth", "flux", "dreambooth/train_dreambooth_lora_flux.py", [*prompt, "--cache_latents"]),
    ]
    for option in ([], ["--gradient_checkpointing"]):
        for name, model, script, words in scripts:
            arguments = [*words, *DIFFUSERS, *option]
            yield Row(" ".join([f"diffusers/{name}", *option]), "diffusers", model, f"examples/{script}", arguments)
        name = " ".join(["musubi-tuner/flux kontext", *option])
        yield Row(name, "musubi_tuner", "flux", "src/musubi_tuner/flux_kontext_train_network.py", [*MUSUBI, *option])
        for model, part, layers in (("sdxl", "unet", ["layer_filter=attentions"]), ("flux", "transformer", [])):
            checkpointing = f"{part}.gradient_checkpointing={'true' if option else 'false'}"
            values = [*ONETRAINER, *layers, f"{part}.weight_dtype=BFLOAT_16", checkpointing]
            words = [word for value in values for word in ("--config-value", value)]
            yield Row(" ".join([f"onetrainer/{model}", *option]), "onetrainer", model, "scripts/train.py", words)


def diffusers_files(row: Row, checkout: Path, scratch: Path, given: argparse.Namespace) -> list[str]:
    """Write a row's model, in diffusers' layout, and images to ``scratch``; return the arguments that name them."""
    images = scratch / "images"
    write_images(images, IMAGES)
    option = "--instance_data_dir"
    if "--instance_prompt" not in row.arguments:
        option = "--train_data_dir"
        captions = [json.dumps({"file_name": file.name, "text": CAPTION}) for file in images.iterdir()]
        (images / "metadata.jsonl").write_text("\n".join(captions) + "\n", encoding="utf-8")
    model = str(diffusers_folder(row.model, scratch))
    return ["--pretrained_model_name_or_path", model, option, str(images), "--output_dir", str(scratch / "output")]


def musubi_files(row: Row, checkout: Path, scratch: Path, given: argparse.Namespace) -> list[str]:
    """Write sd-scripts' FLUX models and an image to ``scratch``, and run the scripts that write the caches of both."""
    sd_scripts = find_or_fetch(given.sd_scripts)
    command = CommandLine(sd_scripts.script("flux_train_network.py"), ["--preset", "flux-lora/base"], {})
    config = memory_config.normalized(memory_config.read(command)[0])
    models = sparse_checkpoints.write(config, scratch / "models")
    tokenizers.write(models.tokenizers)
    paths = {option: str(path) for option, path in models.files.items()}
    images, latents, dataset = scratch / "images", scratch / "latents", scratch / "dataset.toml"
    write_images(images, 1)
    (images / "0.txt").write_text(CAPTION, encoding="utf-8")
    dataset.write_text(
        DATASET.format(size=RESOLUTION, images=images, cache=latents, repeats=IMAGES),
        encoding="utf-8",
    )
    data = ["--dataset_config", str(dataset)]
    encoders = ["--text_encoder1", paths["t5xxl"], "--text_encoder2", paths["clip_l"]]
    if not latents.exists():
        script = "src/musubi_tuner/flux_kontext_cache_latents.py"
        start(checkout, script, [*data, "--vae", paths["ae"]], 0, scratch, given)
        # An assertion that the values are finite fails on the virtual GPU, where comparisons are false.
        script = "src/musubi_tuner/flux_kontext_cache_text_encoder_outputs.py"
        start(checkout, script, [*data, *encoders], 0, scratch, given, PYTHONOPTIMIZE="1")
    output = ["--output_dir", str(scratch / "output"), "--output_name", "peers"]
    return ["--dit", paths["pretrained_model_name_or_path"], "--vae", paths["ae"], *data, *output]


def onetrainer_files(row: Row, checkout: Path, scratch: Path, given: argparse.Namespace) -> list[str]:
    """Write a row's model, in diffusers' layout, an image and a configuration to ``scratch``; return the arguments."""
    images = scratch / "images"
    write_images(images, 1)
    (images / "0.txt").write_text(CAPTION, encoding="utf-8")
    config = {
        "base_model_name": str(diffusers_folder(row.model, scratch)),
        "workspace_dir": str(scratch / "workspace"),
        "cache_dir": str(scratch / "onetrainer-cache"),
        "output_model_destination": str(scratch / "output" / "peers.safetensors"),
        "samples": [],
        "concepts": [{"name": "sks", "path": str(images), "seed": 1, "balancing": IMAGES}],
    }
    file = scratch / "onetrainer.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return ["--preset-path", str(checkout / PRESETS[row.model]), "--config-path", str(file)]


#: Each trainer writes a row's files to the scratch folder, and returns the arguments that name them.
FILES = {"diffusers": diffusers_files, "musubi_tuner": musubi_files, "onetrainer": onetrainer_files}


def diffusers_folder(model: str, scratch: Path) -> Path:
    """Write a model in diffusers' layout to ``scratch``, unless it is there, and return its folder."""
    folder = scratch / "models" / f"diffusers-{model}"
    if not folder.exists():
        diffusers_folders.WRITERS[model](folder)
    return folder


def write_images(folder: Path, count: int) -> None:
    """Write ``count`` images. Other images are deleted."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for index in range(count):
        Image.effect_noise((RESOLUTION, RESOLUTION), 64).convert("RGB").save(folder / f"{index}.png", compress_level=1)


def start(
    checkout: Path, script: str, words: list[str], passes: int, scratch: Path, given: argparse.Namespace, **variables: str
) -> dict[str, Any]:
    """Run a checkout's script until the backward pass after ``passes``, or to its end; return the worker's result."""
    variables |= environment.variables(scratch / "models" / "tokenizers") | {"HF_HOME": str(scratch / "cache")}
    worker = ["benchmarks.peers_worker", str(passes)]
    words = [str(checkout / script), *words]
    return full_size.run_worker(given, scratch, CARD, worker, words, variables, passes, checkout)


def commit(checkout: Path) -> dict[str, str]:
    """Return a checkout's version, its nearest tag, and its commit."""
    commands = {"version": ["describe", "--tags", "--always", "--dirty"], "commit": ["rev-parse", "HEAD"]}
    return {
        name: subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True, text=True).stdout.strip()
        for name, words in commands.items()
    }


def main() -> int:
    """Measure the rows of the trainers that are given, and write the output file after each; return 1 if a run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    for peer in FILES:
        parser.add_argument(f"--{peer.replace('_', '-')}", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", help="measure only rows whose name begins with this text")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    document = json.loads(given.output.read_text(encoding="utf-8")) if given.output.is_file() else {"rows": {}}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (given.scratch or Path(temporary)).resolve()
        for row in [*rows()] * given.rounds:
            if getattr(given, row.peer) is None or not row.name.startswith(given.only):
                continue
            checkout = getattr(given, row.peer).resolve()
            words = [*row.arguments, *FILES[row.peer](row, checkout, scratch, given)]
            used = start(checkout, row.script, words, FIRST_STEPS + MEASURED_STEPS, scratch, given)
            cost = document["rows"].setdefault(row.name, {})
            packages = {name: cache.version(name) for name in PACKAGES}
            cost |= {"arguments": " ".join([row.script, *row.arguments]), **commit(checkout), "packages": packages}
            add_round(cost, used, FIRST_STEPS)
            if "trained" in used:
                cost["trained"] = used["trained"]
            print(f"{row.name}: {cost}", file=sys.stderr, flush=True)
            document |= results.kohya_ext_commit()
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in cost for cost in document["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
