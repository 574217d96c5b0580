"""Write a journal of the run: its settings, steps, losses, times, memory and events, for ``python -m kohya_ext watch``.

Losses are those that the script has read for its progress bar, so a step waits for the GPU as often as without the journal.
A step's line is written when its loss is known. In scripts that record no losses (textual inversion) it is written before the
next step. The learning rates are those of the optimizer during backward, which include the factor of --adaptive_lr.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext import __version__
from kohya_ext.config.command_line import of_this_process, quoted, restart_line
from kohya_ext.config.settings import HIDDEN, Option, Settings, boolean, is_secret, path
from kohya_ext.console import note, warn
from kohya_ext.errors import first_line
from kohya_ext.estimate import predict
from kohya_ext.gpu.peak_memory import before_reset as peaks_before
from kohya_ext.gpu.peak_memory import peak_memory
from kohya_ext.patching.patch import Patch, Target, moved, summary, takes
from kohya_ext.patching.step_values import StepValues
from kohya_ext.patching.training_loop import Program, Stage, TrainingCallback, data_sets, observe, program, step_values
from kohya_ext.patching.types import Accelerator, DataSet
from kohya_ext.preflight import abbreviated
from kohya_ext.run import evaluations, journal, rank_reports, ranks, resume, run_record, step_times, stop_request
from kohya_ext.run.evaluations import Evaluation
from kohya_ext.run.journal import Journal
from kohya_ext.run.journal_reader import RunLog, process_start
from kohya_ext.run.output_files import output_name
from kohya_ext.units import format_size, index_of

JOURNAL = Option(
    "journal",
    True,
    boolean,
    "write a journal of the run for `watch`: settings, losses, times, memory and events; see --journal_file",
)
JOURNAL_FILE = Option[Path | None](
    "journal_file",
    None,
    path,
    "write the journal to this file; default: OUTPUT_NAME.journal.jsonl in --output_dir",
    metavar="FILE",
)

_CAPTION = 300
"""Number of characters of a caption to write."""

_FOLDERS, _TAGS, _PROMPTS = 100, 30, 50
"""Largest numbers of folders, tags and prompts to write."""


@dataclass
class _Recorder(TrainingCallback):
    args: Namespace
    accelerator: Accelerator
    journal: Journal
    device: int | None
    """Index of the CUDA device; None on another device."""
    own: rank_reports.OwnWork | None = None
    """The time that this process does not wait for others; None in a run of one process."""
    step: int = 0
    """Optimizer steps, including those before a resume."""
    epoch: int = 0
    """The current epoch, from 1."""
    ended: bool = False
    failure: str = ""
    """Type and first line of the exception that ends the process."""
    losses: list[float] = field(default_factory=list)
    """Losses of the current step's micro-batches."""
    learning_rates: list[float] = field(default_factory=list)
    values: StepValues = field(default_factory=StepValues)
    """Other values of the step."""
    _complete: bool = False
    """Whether the optimizer has stepped since the last line."""
    _awaits_loss: bool = False
    """Whether the script has not yet recorded the last micro-batch's loss. It also records losses of the validation."""
    _files: int = 0
    """Number of models, states and samples at the end of the last micro-batch."""
    _saving: float = 0.0
    """Time in which models and states were written before the current micro-batch."""
    _skipped: bool = False
    """Whether the current step was skipped."""
    _skips: int = 0
    """Number of events of skipped steps before the current step."""
    _marked: float = field(default_factory=time.perf_counter)
    """Time up to which durations have been added to the next three."""
    _step: float = 0.0
    _data: float = 0.0
    _outside: float = 0.0
    _read: float = field(default_factory=time.monotonic)
    """Time of the last read of the other processes' reports."""

    # --- process -----------------------------------------------------------------------------------------------------

    def on_exception(self, problem: BaseException) -> None:
        """Keep the first line of the exception for the last line of the journal, or the failure that caused it."""
        watch = ranks.watch()
        self.failure = watch.explain(problem) if watch is not None else first_line(problem)

    def on_peer_failure(self, failure: ranks.Failure) -> None:
        """Keep the failure of another process for the last line of the journal."""
        self.failure = failure.reason

    def on_exit(self) -> None:
        """Write the last line."""
        self.finish()

    def on_end(self) -> None:
        """Write the last line."""
        self.finish()
        journal.begin(None)

    def finish(self) -> None:
        """Write the last line and print a summary, once."""
        if self.ended or os.getpid() != self.journal.process:
            return
        self.ended = True
        self._write_step()
        status, reason, code = self._outcome()
        _check_newest_file(self.journal)
        step = self.current_step()
        facts: dict[str, Any] = {"status": status, "reason": reason, "code": code, "step": step, "memory": peak_memory()}
        if self.own is not None:
            facts["ranks"] = self._ranks()
            rank_reports.remove(self.journal.file)
        self.journal.write("end", **facts)
        self.journal.report_problem()
        if self.journal.log.steps:
            for line in _summary_lines(self.journal, status, reason):
                note(line)
        self.journal.close()

    def _outcome(self) -> tuple[str, str, int | None]:
        """Return status, reason and exit code of this process; the code is None if it is not known."""
        code, stopper, total = journal.exit_code(), stop_request.stopper(), self.journal.log.total
        stopped = stopper.reason if stopper is not None else ""
        if self.failure == KeyboardInterrupt.__name__:
            return "stopped", self.failure, 130
        if self.failure:
            out_of_memory = any(line["kind"] == "out_of_memory" for line in self.journal.log.events)
            return "out of memory" if out_of_memory else "failed", self.failure, 1
        if stopper is not None and stopped and code != 0:
            return "stopped" if stopper.code in stop_request.STOPPED else "failed", stopped, stopper.code
        if code or (code is None and (total is None or self.step < total)):
            return "failed", "it ended before its last step" if code is None else f"exit code {code}", code
        return "finished", stopped, 0

    # --- steps -------------------------------------------------------------------------------------------------------

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Count the epoch."""
        self.epoch += 1
        return batches()

    def before_data(self) -> None:
        """Begin to measure the wait for a batch."""
        self._outside += self._lap()

    def after_data(self) -> None:
        """End it."""
        wait = self._lap()
        self._data += wait
        if self.own is not None:
            self.own.add_data(wait)

    def before_batch(self, accelerator: Accelerator) -> None:
        """Write the line of a step whose loss the script does not record."""
        self._step += self._lap()
        self._saving = self.journal.seconds
        self._write_step()
        self._awaits_loss = False
        if not self.journal.log.training:
            self.journal.write(
                "training",
                steps=getattr(self.args, "max_train_steps", None),
                **_data_facts(self.args, accelerator),
                **_caption_facts(accelerator),
                patches=summary(),
                sample_prompts=_sample_prompts(self.args),
            )
        if self.own is not None:
            self._write_ranks()
            self.own.begin_forward()

    def _write_ranks(self) -> None:
        """Write the reports of all processes, once per interval."""
        if time.monotonic() - self._read < rank_reports.INTERVAL:
            return
        self._read = time.monotonic()
        if len(rows := self._ranks()) > 1:
            self.journal.write("ranks", ranks=rows)

    def _ranks(self) -> list[dict[str, Any]]:
        """Return the reports of all processes, this one first."""
        mean = self.own.mean() if self.own is not None else None
        own = {"rank": 0, "host": socket.gethostname(), **peak_memory()}
        return [
            own | ({} if mean is None else {rank_reports.OWN_SECONDS: round(mean, 6)}),
            *rank_reports.read(self.journal.file),
        ]

    def before_backward(self) -> None:
        """Keep the learning rates of the step."""
        if self.own is not None:
            self.own.end_forward()
        rates = (group.get("lr") for optimizer in self.accelerator._optimizers for group in optimizer.param_groups)
        # A rate on the GPU would have to be waited for.
        self.learning_rates = list(dict.fromkeys(rate for rate in rates if isinstance(rate, (int, float))))

    def after_batch(self, accelerator: Accelerator) -> None:
        """Count the step."""
        saving = self.journal.seconds - self._saving  # by patches: the script has not saved yet
        self._step += self._lap() - saving
        self._outside += saving
        self._files = self.journal.files
        self._awaits_loss = True
        if accelerator.sync_gradients:
            self.step = self.current_step(added=1)
            self.epoch = self.epoch if (position := resume.position()) is None else position.epoch + 1
            self._skipped = accelerator.optimizer_step_was_skipped or self.journal.log.skipped > self._skips
            self._skips = self.journal.log.skipped
            self.values = step_values()
            self._complete = True

    def after_validation(self, evaluation: Evaluation) -> None:
        """Write the line of a validation."""
        self.journal.write(evaluations.KIND, **evaluation.line())

    def current_step(self, added: int = 0) -> int:
        """Return the step count of saved states, or else this process's own with the steps ``added`` since its last line."""
        position = resume.position()
        return self.step + added if position is None else position.step

    def add_loss(self, loss: object) -> None:
        """Add the loss that the script has read; write the line if the step is complete."""
        if not self._awaits_loss or not isinstance(loss, float):
            return
        self._awaits_loss = False
        self.losses.append(loss)
        # Since the end of the batch the script has saved and sampled, or else only read the loss.
        if self.journal.files > self._files:
            self._outside += self._lap()
        else:
            self._step += self._lap()
        self._write_step()

    def _lap(self) -> float:
        before, self._marked = self._marked, time.perf_counter()
        return self._marked - before

    def _write_step(self) -> None:
        if not self._complete:
            return
        self._complete = False
        several = len(self.losses) > 1
        self.journal.write(
            "step",
            step=self.step,
            epoch=self.epoch,
            loss=math.fsum(self.losses) / len(self.losses) if several else next(iter(self.losses), None),
            **({"losses": self.losses} if several else {}),
            **self.values.means(),
            learning_rates=self.learning_rates,
            seconds=round(self._step + self._data, 6),
            data=round(self._data, 6),
            outside=round(self._outside, 6),
            **self._memory(),
            **({"skipped": True} if self._skipped else {}),
        )
        self._step = self._data = self._outside = 0.0
        self.losses = []
        self.journal.report_problem()

    def _memory(self) -> dict[str, int]:
        """Return memory and peaks of the caching allocator in bytes, which it counts on the host."""
        if self.device is None:
            return {}
        import torch

        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        memory: dict[str, int] = {}
        for name, earlier in zip(("allocated", "reserved"), peaks_before(self.device), strict=True):
            values = stats.get(f"{name}_bytes", {}).get("all", {})
            memory |= {name: values.get("current", 0), f"peak_{name}": max(values.get("peak", 0), earlier)}
        return memory


@dataclass
class _OtherRank(TrainingCallback):
    """Stores the peaks and times of another process than the first, which writes the journal."""

    report: rank_reports.RankReport
    own: rank_reports.OwnWork
    _began: float = 0.0

    def before_data(self) -> None:
        self._began = time.perf_counter()

    def after_data(self) -> None:
        self.own.add_data(time.perf_counter() - self._began)

    def before_batch(self, accelerator: Accelerator) -> None:
        self.own.begin_forward()

    def before_backward(self) -> None:
        self.own.end_forward()

    def after_batch(self, accelerator: Accelerator) -> None:
        if accelerator.sync_gradients:
            self.report.add(peak_memory(), self.own.mean())


# --- facts -----------------------------------------------------------------------------------------------------------


def _start_facts(args: Namespace, accelerator: Accelerator, run: Program) -> dict[str, Any]:
    """Return the values of the ``start`` line."""
    import torch

    checkout, command = run.checkout, run.command
    started_by = of_this_process()
    name = output_name(args)
    stopper = stop_request.stopper()
    facts: dict[str, Any] = {
        "name": name,
        "script": Path(sys.argv[0]).name,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "process_started": process_start(os.getpid()),
        "processes": accelerator.num_processes,
        "kohya_ext": __version__,
        "sd_scripts": checkout.label if checkout is not None else None,
        "torch": torch.__version__,
        "gpu": _gpu(accelerator),
        "command": started_by.shell_line(),
        "resume_command": restart_line({"resume": resume.AUTO}, started_by),
        "resumed_from": getattr(args, "resume", None),
        "stop_file": os.path.abspath(stopper.file) if stopper is not None else None,
    }
    if command.script is not None:
        facts["settings"] = {
            key: [HIDDEN if is_secret(key) else value, command.origin(key)] for key, value in command.values.items()
        }
    facts["predicted"] = _predicted(args, run)
    return facts


def _gpu(accelerator: Accelerator) -> dict[str, Any] | None:
    if accelerator.device.type != "cuda":
        return None
    import torch

    properties = torch.cuda.get_device_properties(index_of(accelerator.device))
    return {"name": properties.name, "memory": properties.total_memory, "uuid": str(getattr(properties, "uuid", ""))}


def _predicted(args: Namespace, run: Program) -> dict[str, Any]:
    """Return the predictions that are known without measuring."""
    predicted: dict[str, Any] = {}
    key = step_times.current_key()
    if key is not None and (measured := step_times.load(key)) is not None:
        predicted["seconds_per_step"] = measured[0]
    if run.checkout is not None and (estimate := predict.known(run.checkout, args, run.command)) is not None:
        predicted |= {"reserved": estimate.reserved, "allocated": estimate.allocated, "peak_phase": estimate.peak_phase}
    return predicted


def _data_facts(args: Namespace, accelerator: Accelerator) -> dict[str, Any]:
    """Return the numbers of images and epochs, or ``problem``: why they are not known."""
    try:
        sets = data_sets(accelerator)
        buckets: dict[str, int] = {}
        for data_set in sets:
            manager = data_set.bucket_manager
            for (width, height), images in zip(manager.resos, manager.buckets, strict=False):
                size = f"{width}x{height}"
                buckets[size] = buckets.get(size, 0) + len(images)
        per_epoch = math.ceil(len(accelerator._dataloaders[0]) / (getattr(args, "gradient_accumulation_steps", 1) or 1))
        return {
            "epochs": math.ceil(args.max_train_steps / max(per_epoch, 1)),
            "images": sum(len(getattr(data_set, "image_data", ())) for data_set in sets),
            "images_with_repeats": sum(buckets.values()),
            "buckets": buckets,
            "batch_sizes": sorted({data_set.batch_size for data_set in sets}),
        }
    except Exception as problem:  # an unexpected dataset must not end the run
        return {"problem": f"{type(problem).__name__}: {problem}"}


def _caption_facts(accelerator: Accelerator) -> dict[str, Any]:
    """Return folders and tags; the reason for images that are described in another way."""
    try:
        sets = data_sets(accelerator)
        return {"folders": _folders(sets), "tags": _tags(sets)}
    except Exception as problem:  # an unexpected dataset must not end the run
        return {"captions_problem": f"{type(problem).__name__}: {problem}"}


def _folders(sets: Sequence[DataSet]) -> list[dict[str, Any]]:
    """Return the folders of the images: repeats, number of images and of captions, and the first caption."""
    folders: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for image in (image for data_set in sets for image in getattr(data_set, "image_data", {}).values()):
        key = (os.path.dirname(image.absolute_path), image.num_repeats, image.is_reg)
        if key not in folders:
            facts = {"folder": key[0], "repeats": key[1], "regularization": key[2]}
            folders[key] = {**facts, "images": 0, "captioned": 0, "caption": ""}
        row, caption = folders[key], image.caption if isinstance(image.caption, str) else ""
        row["images"] += 1
        row["captioned"] += bool(caption)
        row["caption"] = row["caption"] or caption[:_CAPTION]
    return list(folders.values())[:_FOLDERS]


def _tags(sets: Sequence[DataSet]) -> dict[str, int]:
    """Return the most frequent parts of captions between commas, which sd-scripts has counted."""
    counts: Counter[str] = Counter()
    for tags in (tags for data_set in sets for tags in getattr(data_set, "tag_frequency", {}).values()):
        counts.update(tags)
    return {tag[:_CAPTION]: count for tag, count in counts.most_common(_TAGS)}


def _sample_prompts(args: Namespace) -> list[str]:
    """Return the prompts of the samples, in the order of their numbers in file names; empty unless they are in a text file."""
    file = Path(getattr(args, "sample_prompts", None) or "")
    if file.suffix != ".txt":
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # the script reports it
        return []
    return [line.strip()[:_CAPTION] for line in lines if line.strip() and not line.startswith("#")][:_PROMPTS]


# --- the end ---------------------------------------------------------------------------------------------------------


def _check_newest_file(written: Journal) -> None:
    """Append the event of the check of the newest model, which no other process writes: this run holds the output lock."""
    saves = sorted((line["time"], Path(file)) for file, line in written.log.saves.items() if line["kind"] == "save")
    file = next((file for _, file in reversed(saves) if file.is_file() and not file.stem.endswith("-ema")), None)
    if file is None:
        return
    try:
        from kohya_ext.weights import report

        problems, summary = report.check(file)
    except Exception as problem:  # a check must not end the run
        problems, summary = [], f"not checked: {type(problem).__name__}: {problem}"
    written.write("check", step=written.step(), file=str(file), problems=problems, summary=summary)


def _summary_lines(written: Journal, status: str, reason: str) -> Iterator[str]:
    """Yield at most six lines on the run of this process."""
    log = written.log
    took = step_times.format_duration(log.time - float(log.training.get("time", log.time)))
    of_all = f" of {log.total}" if log.total and log.step != log.total else ""
    median = log.median_seconds()
    skipped = f", {log.skipped} skipped" if log.skipped else ""
    speed = f", {median:.3g} s per step" if median is not None else ""
    why = f" ({reason})" if reason else ""
    yield f"{status}{why} at step {log.step}{of_all} after {took}{speed}{skipped}"
    first, last = log.first_loss(), log.smoothed_loss()
    if first is not None and last is not None:
        means = f" (means of {log.smoothing} steps)" if log.smoothing > 1 else ""
        yield f"loss: first {first:.4g}, last {last:.4g}{means}"
    yield f"peak memory: {_peak(log)}"
    if slowest := rank_reports.slowest(log.ranks):
        yield f"the other processes waited for {slowest}"
    files = [file for name in reversed(log.saves) if (file := Path(name)).exists()]
    if files:
        folder = files[0].parent
        names = [file.name if file.parent == folder else str(file) for file in files]  # after a full disk in another folder
        yield f"written to {folder}: {abbreviated(names, 3)}"
    else:
        yield "written: no model and no state"
    if (check := next((line for line in reversed(log.events) if line["kind"] == "check"), None)) is not None:
        result = f"error: {'; '.join(check['problems'])}" if check["problems"] else check["summary"]
        yield f"checked {Path(check['file']).name}: {result}"
    if status == "failed" and log.newest_state() is not None:
        yield f"to resume: {log.start.get('resume_command', 'add --resume auto to the command line')}"
    elif status == "finished" and written.complete:
        yield f"to see losses, times and events: {quoted(['python', '-m', 'kohya_ext', 'watch', str(written.file)])}"


def _peak(log: RunLog) -> str:
    predicted = log.start.get("predicted", {}).get("reserved")
    expected = f", predicted {format_size(predicted)}" if predicted else ""
    if "peak_reserved" in log.peaks:
        own, name = f"{format_size(log.peaks['peak_reserved'])} reserved on the GPU{expected}", "cuda_reserved"
    else:
        own, name = f"{format_size(peak_memory()['host_resident'])} on the host", "host_resident"
    others = [row[name] for row in log.ranks[1:] if name in row]
    return f"{own}; other processes: at most {format_size(max(others))}" if others else own


# --- patch -----------------------------------------------------------------------------------------------------------


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Recorder | _OtherRank | None:
    folder = getattr(args, "output_dir", None)
    if getattr(args, "debug_dataset", False) or not (folder or settings[JOURNAL_FILE]):
        return None
    name = output_name(args)
    file = settings[JOURNAL_FILE] or Path(folder or ".") / f"{name}{journal.SUFFIX}"
    if not accelerator.is_main_process:
        report = rank_reports.RankReport(file, accelerator.process_index, socket.gethostname())
        return _OtherRank(report, rank_reports.OwnWork(accelerator.device))
    rank_reports.remove(file)
    run = run_record.current() or run_record.describe(Path(sys.argv[0]).name, args)
    fallback = settings["fallback_dir"]
    places = (folder, folder and Path(folder, name).parent, fallback)
    folders = frozenset(os.path.abspath(each) for each in places if each)
    written = Journal(file, run.id, folders)
    written.open()
    try:
        facts = _start_facts(args, accelerator, program())
    except Exception as problem:  # an unexpected command line must not end the run
        warn(f"the journal {file} has no settings: {type(problem).__name__}: {problem}")
        facts = {"name": name, "pid": os.getpid(), "host": socket.gethostname()}
    written.write("start", run=run.id, **facts)
    device = index_of(accelerator.device) if accelerator.device.type == "cuda" else None
    own = rank_reports.OwnWork(accelerator.device) if accelerator.num_processes > 1 else None
    recorder = _Recorder(args, accelerator, written, device, own)
    written.step = recorder.current_step
    journal.begin(written, recorder.finish)
    return recorder


def _add(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def add(self: Any, *, epoch: int, step: int, loss: float) -> None:
        original(self, epoch=epoch, step=step, loss=loss)
        observe(_Recorder, lambda recorder: recorder.add_loss(loss))

    return add


def _log(original: Any, settings: Settings) -> Any:
    """Read the loss of LECO's scripts, which record it nowhere else."""

    @wraps(original)
    def log(self: Any, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        original(self, values, *args, **kwargs)
        if not self._dataloaders:
            observe(_Recorder, lambda recorder: recorder.add_loss(values.get("loss")))

    return log


def _save_image(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save(self: Any, fp: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, fp, *args, **kwargs)
        if isinstance(fp, (str, Path)):
            journal.sampled(Path(fp))
        return result

    return save


PATCH = Patch(
    name="journal",
    summary="write settings, losses, times, memory and events of the run to a journal, and a summary at the end; see `watch`",
    targets=(
        *moved("LossRecorder.add", "library.logging_util", _add, takes("self", "epoch"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.log", _log, body="runs"),
        Target("PIL.Image", "Image.save", _save_image, takes("self", "fp"), body="runs"),
    ),
    options=(JOURNAL, JOURNAL_FILE),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://jsonlines.org",
    wanted=lambda settings: settings[JOURNAL],
    stage=Stage.OBSERVE,
    on_start=_start,
    observes=True,
    only_trains=True,
)
