"""Train a LoRA from a folder of images and a checkpoint.

Finds the kind of the model, the preset for this GPU and the number of steps, shows them with the command that they stand for,
and asks before it starts. Ends with a report and a judgement of the LoRA. Everything after FOLDER can be an option of the
script. The same command resumes a run that stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from kohya_ext.commands import inspect
from kohya_ext.commands import report as report_command
from kohya_ext.config.command_line import quoted
from kohya_ext.config.quiet_parser import QuietParser
from kohya_ext.config.settings import count, flags
from kohya_ext.console import note, warn
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, machine, step_time
from kohya_ext.estimate.result import Estimate
from kohya_ext.launch.accelerate_signals import wait
from kohya_ext.output import Console
from kohya_ext.planning import automatic, from_folder
from kohya_ext.planning.from_folder import FolderRun
from kohya_ext.planning.plan import normalized_config
from kohya_ext.planning.trials import Trial, trials
from kohya_ext.renames import replace_text
from kohya_ext.reporting import file_training, sweep
from kohya_ext.run.journal import SUFFIX
from kohya_ext.run.step_times import format_duration
from kohya_ext.run.stop_request import STOPPED
from kohya_ext.sdscripts.checkouts import Checkout, find_or_fetch
from kohya_ext.sdscripts.families import FAMILIES
from kohya_ext.units import gigabytes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _add_own(parser)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="images, with or without captions of the same name")
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="more options: --preset, --network_dim, --clip_l FILE, ..."
    ).required = False


def _add_own(parser: argparse.ArgumentParser) -> None:
    unset: Any = argparse.SUPPRESS
    parser.add_argument("--model", type=Path, metavar="FILE", default=unset, help="the base model, in .safetensors")
    parser.add_argument("--name", default=unset, help="name of the LoRA; default: that of FOLDER")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", default=unset, help="for the LoRA and its states; default: output"
    )
    parser.add_argument(
        "--no-validation",
        action="store_true",
        default=unset,
        dest="unvalidated",
        help="train on all images, and never stop early",
    )
    parser.add_argument(
        "--no-samples", action="store_true", default=unset, dest="unsampled", help="make no samples after training"
    )
    parser.add_argument(
        "--steps", type=_count, metavar="N", default=unset, help="number of optimizer steps: the script's --max_train_steps"
    )
    parser.add_argument(
        "--try",
        action="append",
        default=unset,
        dest="choices",
        metavar="OPTION=VALUE,...",
        help="train with each of these values, each run in a folder of its own, and compare the validation losses; repeat it "
        "for the combinations with another option's values",
    )
    parser.add_argument("--yes", action="store_true", default=unset, help="start without a question")
    parser.add_argument(
        *flags("sd_scripts"), type=Path, metavar="FOLDER", default=unset, help="use this checkout instead of searching for one"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the run or the runs, ask, train; return the exit code of the training."""
    own, words = _parsed(arguments)
    if "model" not in own:
        raise UserError("--model is missing: the base model, a .safetensors file")
    checkout = find_or_fetch(own.get("sd_scripts"), FAMILIES[0].lora)
    runs = [_run(arguments.folder, own, words, trial, checkout) for trial in trials(own.get("choices", ()))]
    _show(Console(), runs[0].planned, checkout, runs[0].words)
    if own.get("choices"):
        print(f"and {len(runs) - 1} more runs, one after another: {', '.join(run.trial.name for run in runs[1:])}")
    elif sweep.is_finished(runs[0].journal, runs[0].steps):
        name = runs[0].planned.command.values.get("output_name")
        note(
            f"{name}.safetensors is complete: this trains once more from the first step, and keeps the file as "
            f"{name}.previous.safetensors; another --name leaves it alone"
        )
    if not own.get("yes") and not _is_confirmed():
        return 0
    if own.get("choices"):
        return _sweep(runs, own.get("name") or arguments.folder.resolve().name)
    code, _ = runs[0].train()
    if code == 0:
        _report(runs[0].journal)
        _judge(runs[0].journal, own["model"])
    return code


@dataclass(frozen=True)
class _Run:
    """A run that trains the folder."""

    trial: Trial
    planned: FolderRun
    journal: Path
    words: list[str]
    """The words after ``python`` that start it."""

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps, if it is given."""
        steps = self.planned.command.values.get("max_train_steps")
        return None if steps is None else int(steps)

    def train(self) -> tuple[int, int | None]:
        """Train in another process; return the exit code and the number of the signal that asked to stop, if one did."""
        if self.planned.dataset is not None:
            _write(*self.planned.dataset)
        if self.planned.prompts is not None and not self.planned.prompts[0].exists():  # the user may have edited it
            _write(*self.planned.prompts)
        return wait(subprocess.Popen([sys.executable, *self.words]))


def _run(folder: Path, own: dict[str, Any], words: list[str], trial: Trial, checkout: Checkout) -> _Run:
    name = trigger = own.get("name") or folder.resolve().name
    output = own.get("output") or Path("output")
    held_out = 0 if "unvalidated" in own else None
    if trial.name:
        name = f"{name}-{trial.name}"
        output = output / name
        held_out = from_folder.images_in(folder).compared if held_out is None else 0
    words = [*words, *(["--max_train_steps", str(own["steps"])] if "steps" in own else []), *trial.words]
    planned = from_folder.of(folder, own["model"], output, name, checkout.script, words, automatic, held_out, trigger)
    if not trial.name and "unsampled" not in own:
        planned = from_folder.sampled(planned, output / f"{name}.prompts.txt", trigger)
    chosen = ["--sd-scripts", str(checkout.path)] if "sd_scripts" in own else []
    launched = ["-m", "kohya_ext", *chosen, planned.command.name, *planned.command.argv]
    return _Run(trial, planned, output / f"{name}{SUFFIX}", launched)


def _sweep(runs: Sequence[_Run], name: str) -> int:
    """Train the runs that have not finished, one after another, and compare them; return the first exit code that is not 0."""
    codes = []
    stop: int | None = None
    for number, run in enumerate(runs, 1):
        label = f"run {number} of {len(runs)}, {run.trial.name}"
        if sweep.is_finished(run.journal, run.steps):
            note(f"{label}: already finished")
            if changes := sweep.changed(run.journal, run.planned.command.values):
                options = ", ".join(f"--{name}" for name in changes)
                warn(f"{label} had other values of {options} and is not trained again; use another --name")
            continue
        if stop is None:
            note(label)
            code, stop = run.train()
        else:  # it came while the run before was ending, which then finished
            code = 128 + stop
        codes.append(code)
        if code in STOPPED:
            note("the sweep has stopped; the same command continues it")
            break
    rows = [sweep.Row(run.trial.name, sweep.newest_run(run.journal)) for run in runs]
    Console().print(sweep.table(rows))
    note(sweep.verdict(rows))
    output = runs[0].journal.parent.parent / f"{name}.sweep.report.html"
    _report(*(run.journal for run in runs if run.journal.is_file()), output=output)
    return next(filter(None, codes), 0)


def _count(text: str) -> int:
    try:
        return count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parsed(given: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the command's own options, before FOLDER or after it, and the words that are the script's."""
    before = given.words[: len(given.words) - len(given.arguments) - 1]
    parser = QuietParser(add_help=False)
    _add_own(parser)
    own, words = parser.parse_known_args([*before, *given.arguments])
    return vars(own), words


def _show(console: Console, planned: FolderRun, checkout: Checkout, words: list[str]) -> None:
    """Print what the run does, and its command."""
    images, command = planned.images, planned.command
    values = command.values
    steps, table = values.get("max_train_steps"), Table(show_header=False)
    captions = f"{sum(images.captions.values())} captions" if images.captions else "no captions: its name is each image's"
    table.add_row("images", f"{images.count} in {images.folder}, {captions}")
    table.add_row("model", f"{planned.kind.title}: {values.get('pretrained_model_name_or_path')}")
    table.add_row("preset", f"{command.presets.label}; rank {values.get('network_dim', 4)}, batch {planned.batch}")
    if steps is not None:
        each = f"each image {int(steps) * planned.batch / images.count:.0f} times"
        rule = f" (the rule: {from_folder.PER_IMAGE} times, {from_folder.LEAST:,} to {from_folder.MOST:,} images in all)"
        table.add_row("steps", f"{steps:,}: {each}{rule if planned.by_rule else ''}")
    if values.get("validation_split") and values.get("early_stopping"):
        rule = f"{images.held_out_by(float(values['validation_split']))} images are held out"
        patience = f"stops after {values['early_stopping']} validations without an improvement"
        every = int(values.get("validate_every_n_epochs") or 1)
        often = "after each epoch" if every == 1 else f"every {every} epochs"
        table.add_row("validation", f"{rule}, measured {often}; {patience}")
        table.add_row("", "the model with the lowest loss is kept; --no-validation trains on all images")
    if planned.prompts is not None:
        table.add_row("samples", "after training, with the LoRA off, at half and at full strength; Ctrl-C leaves them out")
    for row in _predicted(planned, checkout, int(steps or 0)):
        table.add_row(*row)
    table.add_row("result", f"{values.get('output_dir')}/{values.get('output_name')}.safetensors")
    console.print(table)
    console.print("The command:", highlight=False)
    print(f"  {quoted(['python', *words])}")


def _predicted(planned: FolderRun, checkout: Checkout, steps: int) -> list[tuple[str, str]]:
    """Return rows about memory and time, if they are known."""
    command = planned.command.with_({"dataset_config": None})  # not written yet
    try:
        known = cache.find(checkout, normalized_config(command), command.settings.disable_patch)
    except UserError:
        return []
    if known is None:
        return []
    estimate, gpu = Estimate(**known), machine.gpu()
    rows = [("memory", f"{gigabytes(estimate.total)} GB predicted")]
    time = step_time.predict(estimate, command, gpu) if gpu is not None else None
    if time is not None and steps:
        per_step = step_time.format_seconds(time.seconds)
        rows.append(("time", f"about {format_duration(steps * time.seconds)}, {per_step} per step, before what --speed adds"))
    return rows


def _is_confirmed() -> bool:
    """Ask in a terminal. Raises UserError elsewhere."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UserError("nothing was started, because nobody can be asked here; add --yes")
    try:
        return input("Start? [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        return False


def _write(file: Path, text: str) -> None:
    """Write the training set's file. Raises UserError if another one is there."""
    try:
        if file.is_file() and file.read_text(encoding="utf-8") != text:
            raise UserError(f"{file} exists and is another one; remove it, or use another --name")
        replace_text(file, text)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error}") from None


def _report(*journals: Path, output: Path | None = None) -> None:
    try:
        note(f"report: {report_command.write(*journals, output=output)}")
    except UserError as error:
        warn(f"no report on the run: {error}")


def _judge(journal: Path, base: Path) -> None:
    """Print the judgement of the model with the lowest validation loss, or else of the newest one."""
    try:
        if (file := file_training.chosen_file(journal)) is None:
            return
        report, judged = inspect.judged_file(file, base, journal)
    except (UserError, ValueError) as error:
        warn(f"no judgement of the LoRA: {error}")
        return
    note(f"judgement: {judged.text(report)}")
