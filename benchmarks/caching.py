"""Measure the first and the second start of a training script with caches on disk, upstream's and ours.

    python -m benchmarks.caching [--images 600] [--rounds 2] [--small 10000]

The real script trains an SDXL LoRA at full size up to its first step, by default on a virtual GPU, which computes nothing: what
remains is the host's work. Images are generated JPEGs of 1 to 1.5 megapixels. Each turn starts with a new copy of the folder.
A second part caches the latents of many small images once and measures second starts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import full_size, results, sparse_checkpoints
from benchmarks.processes import WorkerError, last_line
from kohya_ext.config.command_line import CommandLine
from kohya_ext.estimate import memory_config
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.tiny import environment, tokenizers

OUTPUT = results.FOLDER / "caching.json"
SCRIPT = "sdxl_train_network.py"
ARGUMENTS = ("--preset", "24gb", "--network_train_unet_only")
FIRST_STEP = ("--max_train_steps", "3", "--max_data_loader_n_workers", "0")
LATENTS = ("--cache_latents", "--cache_latents_to_disk")
TEXTS = ("--cache_text_encoder_outputs", "--cache_text_encoder_outputs_to_disk")

#: Variant -> arguments.
VARIANTS = {"upstream": ("--disable_patch", "*", "--no-preflight"), "ours": ()}

#: Name of a row -> start and parts of it whose seconds are added.
PARTS = {
    "First start: latents": ("first", ("latents",)),
    "First start: latents, processor seconds": ("first", ("latents, processor",)),
    "First start: latents, processor seconds of the main thread": ("first", ("latents, serial",)),
    "First start: text encoder outputs": ("first", ("texts",)),
    "First start: both caches": ("first", ("latents", "texts")),
    "First start: until the first step": ("first", ("start",)),
    "Second start: both caches": ("second", ("latents", "texts")),
    "Second start: until the first step": ("second", ("start",)),
    "Second start: processor seconds until the first step": ("second", ("processor",)),
    "Many small images, second start: latents": ("small", ("latents",)),
    "Many small images, second start: until the first step": ("small", ("start",)),
    "Many small images, second start: processor seconds until the first step": ("small", ("processor",)),
}

WORDS = ("cat", "dog", "house", "tree", "sky", "river", "street", "red", "old", "bright")


def write_images(folder: Path, count: int, pixels: tuple[float, float]) -> None:
    """Write JPEGs with captions, of several shapes and between two numbers of pixels, to a folder ``1_sks``."""
    from PIL import Image

    images = folder / "1_sks"
    images.mkdir(parents=True)
    numbers = random.Random(0)
    for index in range(count):
        area, ratio = numbers.uniform(*pixels), numbers.choice((2 / 3, 3 / 4, 1, 4 / 3, 3 / 2))
        size = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        # Smooth shapes with some noise: decoding takes as long as for photographs of this quality.
        smooth = Image.effect_noise((size[0] // 8 + 1, size[1] // 8 + 1), 90).resize(size, Image.Resampling.BICUBIC)
        grey = Image.blend(smooth, Image.effect_noise(size, 40), 0.3)
        turned = [grey, grey.transpose(Image.Transpose.FLIP_LEFT_RIGHT), grey.transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
        Image.merge("RGB", turned).save(images / f"{index:06}.jpg", quality=92)
        caption = "a photo of sks, " + " ".join(numbers.choices(WORDS, k=30))
        (images / f"{index:06}.txt").write_text(caption, encoding="utf-8")


def start(
    given: argparse.Namespace,
    checkout: Checkout,
    scratch: Path,
    images: Path,
    words: Sequence[str],
    worker: Sequence[str] = ("benchmarks.caching_worker",),
) -> dict[str, Any]:
    """Start the script in a ``worker``, a module and its arguments after the result's file, and return its result.

    The result of the default worker is the seconds of the parts of the start. Raises WorkerError when it fails.
    """
    models = models_of(checkout, scratch)
    result, log = scratch / "result.json", scratch / "log.txt"
    result.unlink(missing_ok=True)
    launcher = shlex.split(given.launcher.format(python=shlex.quote(given.python), memory="24576MiB"))
    module, *options = worker
    command = [given.python, "-m", module, str(result), *options, "--sd-scripts", str(checkout.path), SCRIPT]
    files = [word for name, path in models.files.items() for word in (f"--{name}", str(path))]
    data = ["--tokenizer_cache_dir", str(models.tokenizers), "--train_data_dir", str(images), "--caption_extension", ".txt"]
    output = ["--output_dir", str(scratch / "output"), "--output_name", "caching", "--seed", "1"]
    variables = environment.variables(models.tokenizers) | {
        "PYTHONPATH": environment.python_path(results.ROOT),
        "KOHYA_EXT_CACHE": str(scratch / "cache"),
    }
    del variables["OMP_NUM_THREADS"]
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            [*launcher, *command, *files, *data, *output, *ARGUMENTS, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=os.environ | variables,
            timeout=given.patience,
        ).returncode
    if code or not result.is_file():
        raise WorkerError(f"exit code {code}: {last_line(log)}")
    written: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return written


def models_of(checkout: Checkout, scratch: Path) -> Any:
    """Return the paths of a sparse checkpoint of SDXL and its tokenizers, written if they are missing."""
    command = CommandLine(checkout.script(SCRIPT), list(ARGUMENTS), {})
    models = sparse_checkpoints.write(memory_config.normalized(memory_config.read(command)[0]), scratch / "models")
    tokenizers.write(models.tokenizers)
    return models


def measure(given: argparse.Namespace, checkout: Checkout, scratch: Path) -> None:
    """Measure all rounds, and write the seconds of each row and variant after each round."""
    document: dict[str, Any] = {"images": given.images, "small_images": given.small}
    document |= results.circumstances(checkout, threads=os.cpu_count())
    write_images(scratch / "images", given.images, (1.0e6, 1.5e6))
    small = scratch / "small"
    small_words = (*LATENTS, "--resolution", "64,64", "--no-cache_text_encoder_outputs")
    if given.small:
        write_images(small, given.small, (66**2, 80**2))
        begun = start(given, checkout, scratch, small, (*FIRST_STEP, *small_words, *VARIANTS["ours"]))
        document["small_images_first_start"] = begun["latents"]
    rows = document["rows"] = {}
    for turn in range(given.rounds):
        for name in list(VARIANTS)[:: 1 if turn % 2 == 0 else -1]:
            images = scratch / "turn"
            shutil.rmtree(images, ignore_errors=True)
            shutil.copytree(scratch / "images", images, copy_function=os.link)
            words = (*FIRST_STEP, *LATENTS, *TEXTS, *VARIANTS[name])
            seconds = {part: start(given, checkout, scratch, images, words) for part in ("first", "second")}
            if given.small:
                seconds["small"] = start(given, checkout, scratch, small, (*FIRST_STEP, *small_words, *VARIANTS[name]))
            for title, (part, names) in PARTS.items():
                if part in seconds:
                    value = sum(seconds[part].get(of, 0.0) for of in names)
                    rows.setdefault(title, {}).setdefault(name, []).append(value)
            print(name, seconds, file=sys.stderr, flush=True)
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[full_size.launching()]
    )
    options.add_argument("--images", type=int, default=600, help="number of JPEGs of 1 to 1.5 megapixels")
    options.add_argument("--small", type=int, default=10000, help="number of small images; 0 leaves that part out")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--output", type=Path, default=OUTPUT)
    return options


def main() -> int:
    """Measure and write the JSON; return the exit code."""
    given = parser().parse_args()
    with tempfile.TemporaryDirectory(dir=given.scratch) as temporary:
        measure(given, find_or_fetch(given.sd_scripts), Path(temporary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
