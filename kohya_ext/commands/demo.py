"""Train a LoRA on a tiny SDXL model with the real script.

The model and a dozen images are generated. The results are printed, and the report on the run is opened in the browser.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kohya_ext.commands import report as report_command
from kohya_ext.config.settings import count, flags
from kohya_ext.console import note, progress, warn
from kohya_ext.errors import UserError
from kohya_ext.output import Console
from kohya_ext.run.journal import SUFFIX
from kohya_ext.sdscripts import checkouts
from kohya_ext.sdscripts.checkouts import Checkout

SCRIPT = "sdxl_train_network.py"
IMAGES = 12
PIXELS = 128
OUTPUT_NAME = "demo"
NEEDED = ("PIL", "torch", "torchvision", "accelerate", "diffusers", "transformers", "tensorboard")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--output", type=Path, default=Path("kohya_ext_demo"), help="folder for all files of the demo")
    parser.add_argument("--steps", type=_steps, default=60, help="training steps")
    parser.add_argument("--preset", default="8gb", help="the preset to train with; its resolution is overridden")
    parser.add_argument(
        *flags("sd_scripts"), type=Path, metavar="FOLDER", help="the sd-scripts checkout to use; default: search for one"
    )
    parser.add_argument("--embedded", action="store_true", help="train with a small built-in loop instead of sd-scripts")


def _steps(text: str) -> int:
    try:
        return count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return its exit code, or the training's."""
    console = Console()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        packages = " ".join("pillow" if name == "PIL" else name for name in missing)
        raise UserError(f"the demo needs packages that are not installed; run `pip install {packages}`")
    from kohya_ext.tiny import dataset  # needs the packages checked above

    folder = arguments.output.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be created: {error.strerror}; use another folder") from None
    checkout = None if arguments.embedded else _checkout(console, arguments.sd_scripts)
    dataset.write(folder / "images", IMAGES, PIXELS)
    files = _Files(folder)
    files.remove_results()
    command, environ = _embedded(arguments, files) if checkout is None else _real(arguments, files, checkout)
    code = _train(console, command, environ, files, arguments.steps)
    if code:
        console.print(f"[red]training failed with exit code {code}[/]; last lines of {escape(str(files.log))}:")
        console.print(escape("\n".join(files.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])))
        return code
    _show(console, files, checkout)
    return 0


@dataclass(frozen=True)
class _Files:
    folder: Path

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def log(self) -> Path:
        return self.folder / "training.log"

    @property
    def events(self) -> Path:
        return self.folder / "logs"

    @property
    def lora(self) -> Path:
        return self.folder / f"{OUTPUT_NAME}.safetensors"

    @property
    def journal(self) -> Path:
        return self.folder / f"{OUTPUT_NAME}{SUFFIX}"

    def remove_results(self) -> None:
        """Remove the results of an earlier demo."""
        for file in (self.report, self.log, self.lora, self.journal, *self.events.rglob("events.*")):
            file.unlink(missing_ok=True)


def _checkout(console: Console, folder: Path | None) -> Checkout | None:
    if folder is not None:
        return checkouts.find(folder)
    try:
        return checkouts.find_or_fetch()
    except UserError as error:
        console.print(f"[yellow]{escape(str(error))}[/]")
        console.print("Continuing without sd-scripts: an SDXL-shaped U-Net from diffusers and a small built-in training loop.")
        return None


def _real(arguments: argparse.Namespace, files: _Files, checkout: Checkout) -> tuple[list[str], dict[str, str]]:
    with progress("creating a tiny SDXL checkpoint and tokenizers"):
        from kohya_ext.tiny import arguments as tiny
        from kohya_ext.tiny import checkpoints, environment

        models = checkpoints.write("sdxl", checkout.path, files.folder / "models")
    command = [sys.executable, "-m", "kohya_ext", "--sd-scripts", str(checkout.path), SCRIPT]
    command += ["--preset", arguments.preset, "--report", str(files.report)]
    command += tiny.training_arguments(SCRIPT, models, files.folder / "images", files.folder)
    command += [
        "--output_name",
        OUTPUT_NAME,
        "--max_train_steps",
        str(arguments.steps),
        "--logging_dir",
        str(files.events),
        "--learning_rate",
        "1e-3",
    ]
    return command, {**os.environ, **environment.variables(models.tokenizers)}


def _embedded(arguments: argparse.Namespace, files: _Files) -> tuple[list[str], dict[str, str]]:
    command = [
        sys.executable,
        "-m",
        "kohya_ext.launch.demo_training",
        "--preset",
        arguments.preset,
        "--report",
        str(files.report),
    ]
    command += ["--train_data_dir", str(files.folder / "images"), "--output_dir", str(files.folder)]
    command += ["--output_name", OUTPUT_NAME, "--max_train_steps", str(arguments.steps)]
    command += ["--logging_dir", str(files.events), "--mixed_precision", "no"]
    return command, {**os.environ, "OMP_NUM_THREADS": "1"}


def _train(console: Console, command: Sequence[str], environ: dict[str, str], files: _Files, steps: int) -> int:
    """Run the training with its output in the log and a progress bar; return its exit code."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    if not console.is_terminal:  # without a progress bar
        note(f"training {steps} steps; the output is in {files.log}")
    with Progress(*columns, console=console) as progress, files.log.open("w", encoding="utf-8") as log:
        task = progress.add_task("loading sd-scripts", total=steps)
        process = subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            # Text mode also splits lines at the carriage returns of tqdm's progress bars.
            if match := re.match(rf"steps:.*?(\d+)/{steps} ", line):
                progress.update(task, completed=int(match.group(1)), description="training")
        return process.wait()


def _show(console: Console, files: _Files, checkout: Checkout | None) -> None:
    report = json.loads(files.report.read_text(encoding="utf-8"))
    losses, seconds = _losses(files.events)
    table = Table(show_header=False, title="results")
    table.add_row(
        "trained by", f"{report['script']} of {checkout.label}" if checkout else "the built-in loop, without sd-scripts"
    )
    table.add_row("preset", ", ".join(report["presets"]))
    table.add_row("steps per second", f"{(len(losses) - 1) / seconds:.1f}" if seconds > 0 else "not measured")
    table.add_row("peak memory", _memory(report["memory"]))
    table.add_row(
        "loss",
        f"{_mean(losses[: len(losses) // 4]):.3f} in the first quarter, {_mean(losses[-len(losses) // 4 :]):.3f} in the last",
    )
    table.add_row("LoRA file", f"{files.lora} ({files.lora.stat().st_size / 1e6:.2f} MB)")
    console.print(table)
    if checkout is None:
        note("no report on the run, because only runs of sd-scripts write a journal; run `python -m kohya_ext setup`")
    else:
        _open_report(files.journal, console.is_terminal)


def _open_report(journal: Path, in_terminal: bool) -> None:
    """Write the report on a run, print its path, and open it where there is a browser."""
    try:
        page = report_command.write(journal)
    except UserError as error:
        warn(f"no report on the run: {error}")
        return
    note(f"report on the run: {page}")
    if in_terminal and _has_browser():
        webbrowser.open(page.as_uri())


def _has_browser() -> bool:
    """Return whether a page can be opened in a window; without a display Linux would show it in the terminal."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _memory(memory: dict[str, int]) -> str:
    if "cuda_reserved" in memory:
        return f"{memory['cuda_allocated'] / 1e9:.2f} GB allocated, {memory['cuda_reserved'] / 1e9:.2f} GB reserved on the GPU"
    return f"{memory['host_resident'] / 1e9:.2f} GB of host memory (no GPU in use)"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _losses(folder: Path) -> tuple[list[float], float]:
    """Return the loss of each step and the seconds from the first to the last, from TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = []
    for file in folder.rglob("events.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in ("loss/current", "loss"):
            if tag in events.Tags()["scalars"]:
                rows += [(event.step, event.value, event.wall_time) for event in events.Scalars(tag)]
                break
    rows.sort()
    return [value for _, value, _ in rows], rows[-1][2] - rows[0][2] if rows else 0.0
