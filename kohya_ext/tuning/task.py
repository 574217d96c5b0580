"""What a process of `tune` does instead of training: a JSON text in an environment variable, which its parent sets.

The process loads the user's models and data, but writes nothing of the run: no output, samples, trackers, states or journal.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, moved, takes
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator

VARIABLE = "KOHYA_EXT_TUNE"

#: Images of each dataset that are used, evenly chosen: enough for the steps, without hours of caching.
MOST_IMAGES = 128

#: Steps of the run, as far as the trial of --speed knows, which then takes all the time that it may.
_STEPS = 100_000

#: Arguments of scripts that would write, send, resume or sample something -> their value.
_QUIET: Mapping[str, object] = {
    **dict.fromkeys(("logging_dir", "log_with", "log_tracker_name", "log_tracker_config", "resume", "sample_prompts")),
    **dict.fromkeys(("sample_every_n_steps", "sample_every_n_epochs", "huggingface_repo_id", "max_train_epochs")),
    **dict.fromkeys(("save_every_n_steps", "save_every_n_epochs", "save_n_epoch_ratio", "initial_epoch", "initial_step")),
    **dict.fromkeys(("validate_every_n_steps", "validate_every_n_epochs")),
    **dict.fromkeys(("save_state", "save_state_on_train_end", "sample_at_first", "resume_from_huggingface"), False),
    **dict.fromkeys(("save_state_to_huggingface", "skip_until_initial_step"), False),
}

#: Seconds between two looks at the parent, and those until a process that was asked to end is ended.
_INTERVAL, _PATIENCE = 0.5, 10.0

_STOP_FILE = "stop"


@dataclass(frozen=True)
class Task:
    """What a process measures, and where."""

    folder: str
    """The folder of its files."""
    kind: Literal["steps", "losses"] = "steps"
    parent: int = 0
    """The process that waits for the result."""
    first: int = 12
    """Optimizer steps that are not measured: they load kernels, create states, and try and record features."""
    checks: bool = True
    """Whether the process checks the command line and the data before it loads a model."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Options of the extension that `tune` adds -> the user's value, None without one. What a trial of --speed chooses is kept
    for the user's options."""
    precisions: tuple[str, ...] = ()
    """The 8-bit formats in which a record of losses in 16 bits also computes each layer."""
    reference: str = ""
    """The file with the blocks' outputs in 16 bits, for a record of losses in 8 bits."""

    @property
    def result(self) -> Path:
        """The file with the result."""
        return Path(self.folder) / "result.json"

    @property
    def stop_file(self) -> Path:
        """The file that asks the process to end."""
        return Path(self.folder) / _STOP_FILE

    def variables(self) -> dict[str, str]:
        """Return the environment variables that give a process this task."""
        return {VARIABLE: json.dumps(asdict(self))}

    def write(self, result: Mapping[str, Any]) -> None:
        """Write the result. Raises OSError."""
        from kohya_ext.renames import replace_text

        replace_text(self.result, json.dumps(result) + "\n")


def current() -> Task | None:
    """Return the task of this process; None in a training run."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    values = json.loads(text)
    return Task(**{**values, "precisions": tuple(values["precisions"])})


def quiet(args: Namespace, task: Task) -> None:
    """Change a script's final arguments, wherever they come from, so that the process writes nothing of the user's run."""
    for name, value in _QUIET.items():
        if hasattr(args, name):
            setattr(args, name, value)
    for name, value in task.own.items():
        if value is not None:
            setattr(args, name, value)
        elif hasattr(args, name):
            delattr(args, name)
    args.output_dir, args.output_name = str(Path(task.folder) / "output"), "tune"
    args.max_train_steps = max(getattr(args, "max_train_steps", None) or 0, _STEPS)
    if task.kind == "losses":
        args.seed = 0 if getattr(args, "seed", None) is None else args.seed
        args.max_grad_norm = 0.0


def watch_parent(task: Task) -> None:
    """Interrupt the script, as Ctrl-C does, when the parent asks for it or has ended."""
    threading.Thread(target=_watch, args=(task,), daemon=True).start()


def _watch(task: Task) -> None:
    import psutil  # accelerate needs it

    while not task.stop_file.exists() and psutil.pid_exists(task.parent):
        time.sleep(_INTERVAL)
    _interrupt()
    time.sleep(_PATIENCE)
    os._exit(1)


def _interrupt() -> None:
    """Interrupt the main thread, also while it waits in a system call."""
    if os.name == "nt":
        signal.raise_signal(signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)


def patch(task: Task, start: Callable[[Namespace, Accelerator, Task], TrainingCallback]) -> Patch:
    """Return the patch of a process with a task: ``start`` returns its callback."""

    def on_start(args: Namespace, accelerator: Accelerator, settings: Settings) -> TrainingCallback:
        return start(args, accelerator, task)

    return Patch(
        name="tune",
        summary="measure some steps of a process of `tune`, and end it",
        targets=moved(
            "BaseDataset.make_buckets", "library.dataset", _with_few_images, takes("self", exactly=True), body="runs"
        ),
        exactness="exact",
        held_to="the same run on the chosen images",
        idea="https://pytorch.org/docs/stable/benchmark_utils.html",
        stage=Stage.VALIDATE,
        on_start=on_start,
    )


def _with_few_images(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def make_buckets(self: Any) -> Any:
        step = -(-len(self.image_data) // MOST_IMAGES)
        if step > 1:
            self.image_data = dict(islice(self.image_data.items(), 0, None, step))
        return original(self)

    return make_buckets
