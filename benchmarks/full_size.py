"""Run the shipped tiers at full size on a virtual GPU of each tier's size, and compare their memory with the estimates.

    python -m benchmarks.full_size [--only sdxl-lora/8gb] [--faster] [--compiled] [--eight_bits] [--planned] [--fresh]
    python -m benchmarks.full_size --random 20 --seed 1
    python -m benchmarks.full_size --command "sdxl_train_network.py --preset 8gb --network_dim 64" --gpu_memory 8

Each row is a preset of the table of estimates: the real script trains four steps from sparse checkpoints (zeros that take no
disk space). PyTorch's CUDA path and its caching allocator are real; a virtual GPU only computes nothing. A row takes 20 to 90 s
and 2 to 6 GB of host memory. Rows in the output file are only predicted again, unless ``--again`` is given, so that an
interrupted run continues. With ``--faster`` the next faster choices of each tier, which do not fit its card, run on a card of
160 GB as well, with ``--compiled`` each family's LoRA with compiled blocks, with ``--eight_bits`` those with an 8-bit base, and
with ``--planned`` some answers of ``plan``.
``--command`` runs another command line, and writes no file. ``--random`` runs random ones (command_lines.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import command_lines, results, sparse_checkpoints
from benchmarks.processes import last_line
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.dry_run import estimation, several_processes
from kohya_ext.dry_run.arguments import caption_tokens
from kohya_ext.errors import UserError
from kohya_ext.estimate import gpus, memory_config
from kohya_ext.planning.plan import plan
from kohya_ext.planning.tiers import faster, tiers, words
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.tiny import environment, tokenizers
from kohya_ext.units import GIB, read_card

#: The command before the Python interpreter that gives it a virtual GPU of ``{memory}``, such as 16GiB.
LAUNCHER = "{python} -m virtual_gpu 4090 --memory {memory} --"

OUTPUT = results.FOLDER / "full_size.json"
RANDOM_OUTPUT = results.FOLDER / "full_size_random.json"
STEPS = 4
LARGE_CARD = 160 * GIB

#: Width over height of the images with ``--buckets``: as many bucket sizes.
SHAPES = (1.0, 0.68, 1.46, 1.29)

#: Families whose step reads lengths or a timestep's index from the GPU, where a virtual one has only zeros.
READS_INTEGERS = ("chroma", "flux", "lumina", "hunyuan-image")

#: At least as many characters as a text encoder takes tokens; the tokenizers here have one token for each. The quoted text is
#: what HunyuanImage's second text encoder reads.
CAPTION = 'a sign with the words "' + "sks style " * 20 + '" on ' + "a wall " * 100


@dataclass(frozen=True)
class Row:
    """A command line to run, without models, images and output."""

    name: str
    script: str
    arguments: list[str]
    card: int
    """Bytes of the virtual GPU."""


def rows(with_faster: bool) -> Iterator[Row]:
    """Yield every shipped tier and, after each, its next faster choice."""
    for tier in [*tiers(), *tiers(experimental=True)]:
        script = preset_files.scripts(tier.family)[0]
        preset = ["--preset", tier.name]
        yield Row(tier.name, script, preset, tier.card)
        if with_faster and (choice := faster(tier)) is not None and not tier.config.blocks_to_swap:
            changed = words(tier.config, choice)
            yield Row(f"{tier.name} {' '.join(changed)}", script, [*preset, *changed], LARGE_CARD)


def compiled() -> Iterator[Row]:
    """Yield each family's LoRA with compiled blocks, with and without checkpointing, and two with CUDA graphs."""
    for name in dict.fromkeys(tier.family for tier in tiers() if tier.family.endswith("-lora")):
        for option in ("--gradient_checkpointing", "--no-gradient_checkpointing"):
            words = ["--preset", f"{name}/base", option, "--selective_torch_compile"]
            graphs = [["--cuda_graphs"]] if name in ("sdxl-lora", "flux-lora") else []
            for more in ([], *graphs):
                yield Row(
                    " ".join(["compiled:", *words[1:], *more]), preset_files.scripts(name)[0], [*words, *more], LARGE_CARD
                )


#: Families, all if empty -> options of their LoRA runs with an 8-bit base.
EIGHT_BITS = {
    "": (
        "--base_precision int8 --gradient_checkpointing",
        "--base_precision int8 --no-gradient_checkpointing",
        "--base_precision int8 --gradient_checkpointing --selective_torch_compile",
    ),
    "sdxl-lora flux-lora": (
        "--base_precision fp8 --gradient_checkpointing",
        "--base_precision int8 --gradient_checkpointing --fused_operations",
        "--base_precision int8 --gradient_checkpointing --cuda_graphs",
        "--base_precision int8 --gradient_checkpointing --cuda_graphs --fused_operations",
        "--base_precision fp8 --gradient_checkpointing --selective_torch_compile --cuda_graphs",
        "--base_precision int8 --no-gradient_checkpointing --fused_operations",
    ),
    "flux-lora lumina-lora": ("--base_precision int8 --gradient_checkpointing --blocks_to_swap 10",),
}


def eight_bits() -> Iterator[Row]:
    """Yield each family's LoRA with an 8-bit base, with the options that change its memory."""
    for name in dict.fromkeys(tier.family for tier in tiers() if tier.family.endswith("-lora")):
        for families, variants in EIGHT_BITS.items():
            for options in variants if name in (families or name).split() else ():
                words = ["--preset", f"{name}/base", *options.split()]
                yield Row(" ".join(["8-bit base:", *words[1:]]), preset_files.scripts(name)[0], words, LARGE_CARD)


#: Questions to ``plan``: the GPU's size in GB, the script, and the user's own options.
QUESTIONS = (
    (6, "sdxl_train_network.py", "--network_dim 16"),
    (8, "sdxl_train_network.py", "--network_dim 64 --optimizer_type Adafactor"),
    (12, "sdxl_train_network.py", "--train_batch_size 4 --resolution 768"),
    (24, "sdxl_train.py", "--optimizer_type AdamW8bit"),
    (12, "flux_train_network.py", "--network_dim 8 --resolution 512"),
    (16, "flux_train_network.py", "--network_dim 32"),
    (24, "flux_train.py", "--resolution 768"),
    (16, "lumina_train_network.py", "--network_dim 32"),
    (8, "train_network.py", "--train_batch_size 8"),
)


def chosen(given: argparse.Namespace, checkout: Checkout) -> Iterator[Row]:
    """Yield the rows that the options ask for."""
    if given.command:
        script, *arguments = shlex.split(given.command)
        yield Row(given.command, script, arguments, given.gpu_memory)
        return
    if given.random:
        networks = {file.stem for file in (checkout.path / "networks").glob("*.py")}
        for script, arguments in itertools.islice(command_lines.draw(given.seed, networks), given.random):
            yield Row(" ".join([script, *arguments]), script, arguments, LARGE_CARD)
        return
    more = itertools.chain(
        compiled() if given.compiled else (),
        eight_bits() if given.eight_bits else (),
        planned(checkout) if given.planned else (),
    )
    every = itertools.chain(rows(given.faster), more)
    yield from (row for row in every if re.match(given.only, row.name))


def planned(checkout: Checkout) -> Iterator[Row]:
    """Yield the answers of ``plan`` to :data:`QUESTIONS`."""
    for size, script, options in QUESTIONS:
        card = size * GIB
        command = CommandLine(checkout.script(script), options.split(), {})
        answer = plan(checkout, command, card, gpus.typical(card), lambda line: None).answer.command
        yield Row(f"plan: {size} GB {script} {options}", script, [*answer.argv], card)


def measure(
    row: Row, checkout: Checkout, scratch: Path, given: argparse.Namespace, used: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a row's prediction and what its run used, in bytes: ``used``, or measured now."""
    if "--speed" not in row.arguments:  # what it turns on takes free memory, which estimates leave out
        row = replace(row, arguments=[*row.arguments, "--speed", "off"])
    arguments, config = training_arguments(row, checkout, scratch, given.steps + 1, shapes=SHAPES if given.buckets else (1.0,))
    predicted = estimation.estimate(checkout, CommandLine(checkout.script(row.script), arguments, {}), fresh=given.fresh)
    # The estimate's own figure is that of the phase with the most reserved memory.
    memory = {"allocated": max(predicted.phase_peaks.values()), "reserved": predicted.reserved}
    if used is None:
        used = run(row, checkout, scratch, given, arguments, passes(config, given.steps), tokens(config))
    return {
        "card": row.card,
        "arguments": " ".join([row.script, *row.arguments]),
        "predicted": memory,
        "used": used,
        "error_percent": {kind: round(100 * (size / used[kind] - 1), 2) for kind, size in memory.items() if used.get(kind)},
    }


def training_arguments(
    row: Row, checkout: Checkout, scratch: Path, steps: int, random: bool = False, shapes: Sequence[float] = (1.0,)
) -> tuple[list[str], memory_config.MemoryConfig]:
    """Write a row's models and images to ``scratch``; return its arguments for ``steps`` steps, and its configuration.

    The models' weights are zeros, or ``random``. ``shapes`` multiply the width and divide the height of images of equal areas.
    """
    command = CommandLine(checkout.script(row.script), row.arguments, {})
    config = memory_config.normalized(memory_config.read(command)[0])
    files = sparse_checkpoints.write(config, scratch / "models", random)
    tokenizers.write(files.tokenizers)
    images = scratch / "images"
    # Training and caching have full batches.
    count = math.lcm(config.train_batch_size * config.gradient_accumulation_steps, max(config.vae_batch_size, 1))
    sizes = [_of_shape(memory_config.size(config), shape) for shape in shapes]
    write_images(images, count, sizes, steps if len(sizes) == 1 else 1)  # with several, an epoch has each once
    option = config.family.checkpoints[0].option
    recorded = ["--cuda_graphs_always"] if "--cuda_graphs" in row.arguments else []  # within few steps
    return [
        *row.arguments,
        *recorded,
        *(word for name, path in files.files.items() for word in (f"--{name}", str(path))),
        *("--tokenizer_cache_dir", str(files.tokenizers), "--train_data_dir", str(images), "--caption_extension", ".txt"),
        *("--output_dir", str(scratch / "output"), "--output_name", "full_size", "--save_model_as", "safetensors"),
        *("--max_train_steps", str(steps), "--max_data_loader_n_workers", "0", "--seed", "1"),
        *option_words({} if option is None else dict([option])),
    ], config


def _of_shape(size: tuple[int, int], shape: float) -> tuple[int, int]:
    """Return a size of about the same area, of another shape; the size itself for the shape 1."""
    width, height = (round(side * factor / 64) * 64 for side, factor in zip(size, (shape**0.5, shape**-0.5), strict=True))
    return size if shape == 1 else (width, height)


def passes(config: memory_config.MemoryConfig, steps: int) -> int:
    """Return the backward passes of ``steps`` optimizer steps."""
    return steps * config.gradient_accumulation_steps


def tokens(config: memory_config.MemoryConfig) -> int:
    """Return the length that the worker assumes, as a dry run does; 0 for a family that does not read it from the GPU."""
    reads = config.family.name in READS_INTEGERS
    return caption_tokens(config.script, vars(config), memory_config.size(config)) if reads else 0


def run(
    row: Row, checkout: Checkout, scratch: Path, given: argparse.Namespace, arguments: list[str], passes: int, tokens: int
) -> dict[str, Any]:
    """Run a command line on the virtual GPU for some backward passes, and return the worker's result."""
    worker = ["benchmarks.full_size_worker", str(passes), str(tokens), str(int(given.allocations))]
    words = ["--sd-scripts", str(checkout.path), row.script, *arguments]
    processes = several(row, checkout)
    if processes:  # they would agree on a stop, since the integer that they exchange comes back as a length of captions
        words += ["--disable_patch", "safe_stop"]
    variables = environment.variables(scratch / "models" / "tokenizers") | processes
    return run_worker(given, scratch, row.card, worker, words, variables, passes)


def several(row: Row, checkout: Checkout) -> dict[str, str]:
    """Return the environment variables of the first of a row's processes; none for a single one without DeepSpeed."""
    settings = CommandLine(checkout.script(row.script), row.arguments, {}).settings
    return several_processes.variables(settings.num_processes or 1)


def run_worker(
    given: argparse.Namespace,
    scratch: Path,
    card: int,
    worker: list[str],
    words: list[str],
    variables: dict[str, str],
    passes: int,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Run a ``worker``, a module and its arguments after the result's file, on a virtual GPU of ``card`` bytes, in ``folder``.

    Return its result, with ``failed`` if it has not counted ``passes``.
    """
    result, compiled = scratch / "result.json", scratch / "compiled"
    result.unlink(missing_ok=True)
    shutil.rmtree(compiled, ignore_errors=True)
    launcher = shlex.split(given.launcher.format(python=shlex.quote(given.python), memory=f"{card // 2**20}MiB"))
    variables = variables | {
        "PYTHONPATH": environment.python_path(results.ROOT),
        "KOHYA_EXT_CACHE": str(scratch / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),  # kernels in the user's folder are not timed again
        "TQDM_DISABLE": "1",
    }
    module, *options = worker
    log = scratch / "log.txt"
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(
            [*launcher, given.python, "-m", module, str(result), *options, *words],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=folder or scratch,
            env=os.environ | variables,
            timeout=given.patience,
        ).returncode
    if not result.exists():
        return {"failed": f"exit code {code}: {last_line(log)}"}
    used: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return used if len(used["steps"]) == passes else {**used, "failed": f"exit code {code}: {last_line(log)}"}


def write_images(folder: Path, count: int, sizes: Sequence[tuple[int, int]], repeats: int) -> None:
    """Write ``count`` images of each size and their captions. Other images are deleted."""
    from PIL import Image

    shutil.rmtree(folder, ignore_errors=True)
    images = folder / f"{repeats}_sks"
    images.mkdir(parents=True)
    for index, size in enumerate([*sizes] * count):
        Image.effect_noise(size, 64).convert("RGB").save(images / f"{index}.png", compress_level=1)
        (images / f"{index}.txt").write_text(CAPTION, encoding="utf-8")


def launching() -> argparse.ArgumentParser:
    """Return a parser of the options that say where and how the worker runs."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--sd-scripts", type=Path, metavar="FOLDER")
    parser.add_argument("--launcher", default=LAUNCHER, help="command that gives {python} a virtual GPU of {memory}")
    parser.add_argument("--python", default=sys.executable, help="interpreter with a CUDA build of torch")
    parser.add_argument("--patience", type=float, default=600, help="seconds after which a run is ended")
    parser.add_argument("--scratch", type=Path, help="folder for sparse checkpoints, images and logs")
    parser.set_defaults(allocations=False)
    return parser


def main() -> int:
    """Run the rows that are not in the output file, and write it after each; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[launching()]
    )
    parser.add_argument("--only", default="", help="only rows whose names begin with a match of this expression: flux-lora/")
    parser.add_argument("--faster", action="store_true", help="also the next faster choice of each tier")
    parser.add_argument("--compiled", action="store_true", help="also each family's LoRA with compiled blocks")
    parser.add_argument("--eight_bits", action="store_true", help="also each family's LoRA with an 8-bit base")
    parser.add_argument("--planned", action="store_true", help="also answers of plan")
    parser.add_argument("--command", metavar="WORDS", help="run only this script and its arguments, without models and images")
    parser.add_argument("--random", type=int, metavar="N", help="run only N random command lines")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of --random, default: %(default)s")
    parser.add_argument("--gpu_memory", default="80GiB", metavar="SIZE", type=read_card, help="the GPU's size for --command")
    parser.add_argument("--buckets", action="store_true", help="images of four bucket sizes instead of one, each once an epoch")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="train this many steps, default: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="measure the estimates instead of reading the package's table")
    parser.add_argument("--again", action="store_true", help="run rows that are in the output file again")
    parser.add_argument("--allocations", action="store_true", help="record the tensors at the peak by lines of code")
    parser.add_argument(
        "--output", type=Path, help="default: full_size.json of the results; for --random full_size_random.json"
    )
    given = parser.parse_args()
    given.output = given.output or (RANDOM_OUTPUT if given.random else OUTPUT)
    checkout = find_or_fetch(given.sd_scripts)
    exists = given.output.is_file() and not given.command
    document = json.loads(given.output.read_text(encoding="utf-8")) if exists else {"rows": {}}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = given.scratch or Path(temporary)
        for row in chosen(given, checkout):
            used = None if given.again else document["rows"].get(row.name, {}).get("used")
            try:
                measured = measure(row, checkout, scratch, given, used)
            except UserError as error:
                measured = {"error_percent": {}, "used": {"failed": f"not estimated: {error}"}}
            document["rows"][row.name] = measured
            print(f"{row.name}: {measured['error_percent']} {measured['used'].get('failed', '')}", file=sys.stderr, flush=True)
            if given.command:
                print(json.dumps(measured, indent=1))
                continue
            document |= {"sd_scripts": checkout.version, **results.kohya_ext_commit()}
            given.output.parent.mkdir(parents=True, exist_ok=True)
            given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in row["used"] for row in document["rows"].values()))


if __name__ == "__main__":
    sys.exit(main())
