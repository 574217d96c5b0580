"""Save model and state of the last complete step after an exception.

The weights are those of that step until an optimizer begins the next one. The state is saved with the step's position and
random numbers, so that the resumed run equals the uninterrupted one. The script's own statements save the model.

With several processes, the failed one publishes its error and its random state, and waits. The optimizer of the others cannot
step without its gradients, so the first process saves in another thread, with the random state of every process. With
DeepSpeed and FSDP nothing is saved, because that takes all processes.

Another thread also saves when Windows is about to end the process. The main thread then begins no other step.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.console import note, printing, warn
from kohya_ext.errors import first_line
from kohya_ext.patching.step_loss import callers
from kohya_ext.patching.step_save import StepSave, step_save
from kohya_ext.patching.training_loop import TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks, resume, retry_request
from kohya_ext.run.atomic_write import final_path, not_waiting, written_files
from kohya_ext.run.output_files import rolling_state

#: Keys of the values that the processes share.
_PART, _SAVED = "failure/part/", "failure/saved"

_PART_TIMEOUT = 30.0
"""Seconds that the first process waits for another one's random state."""

_PAUSE = 0.01
"""Seconds between two looks at what the main thread does."""


@dataclass
class LastStep(TrainingCallback):
    """The last complete step of a run, which is saved when the run fails."""

    args: Namespace
    accelerator: Accelerator
    steps_in_backward: bool = False
    """Whether the optimizer steps during the backward pass."""
    steps: int = 0
    """Complete steps of this process."""
    snapshot: resume.Snapshot | None = None
    """Position after the last complete step; None if no patch counts the position."""
    intact: bool = True
    """Whether the weights are still those after that step."""
    states: list[tuple[int, Path]] = field(default_factory=list)
    """(step, folder) of the states that this run began to save, in order."""
    _is_between_steps: bool = False
    """Whether no micro-batch of the next step is trained."""
    _is_done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_quiet: bool = True
    """Whether the main thread changes nothing that a state contains: it loads no batch, and no optimizer steps."""
    _gate: threading.Lock = field(default_factory=threading.Lock)
    """Held while `_is_quiet` changes and while a save in another thread starts."""
    _end: threading.Event | None = None
    """Set when that save has ended."""
    _code: int = 0
    """The exit code after it."""

    # --- steps -------------------------------------------------------------------------------------------------------

    def before_data(self) -> None:
        """Renew the random state: since the step, the script has saved, sampled and logged."""
        self._begin_change()
        if self.snapshot is not None and self._is_between_steps:
            self.snapshot = replace(self.snapshot, random=resume.random_state())

    def after_data(self) -> None:
        """Note that the batch is loaded."""
        self._is_quiet = True

    def before_backward(self) -> None:
        """Note that an optimizer changes weights, if it steps during the backward pass."""
        if self.steps_in_backward:
            self.before_optimizer_step()

    def before_optimizer_step(self) -> None:
        """Note that the optimizer changes weights."""
        self._begin_change()
        self.intact = False

    def after_batch(self, accelerator: Accelerator) -> None:
        """Keep the position after a step."""
        current = resume.position()
        self._is_between_steps = bool(accelerator.sync_gradients)
        if accelerator.sync_gradients:
            self.steps += 1
            self.intact = self._is_quiet = True
            self.snapshot = current.snapshot() if current is not None else None
            self._leave_if_saved()

    def on_state_save(self, folder: Path) -> None:
        """Keep the step and the path of a state."""
        current = resume.position()
        self.states.append((current.step if current is not None else 0, final_path(folder)))

    def newest_state(self) -> Path | None:
        """Return the newest state that this run saved, or else the state that it resumed from."""
        resumed = getattr(self.args, "resume", None)
        saved = next((state for _, state in reversed(self.states) if state.is_dir()), None)
        return saved or (Path(resumed) if resumed else None)

    # --- end of the process ------------------------------------------------------------------------------------------

    def save_before_end(self, seconds: float, code: int) -> None:
        """Save in this thread, because the system is about to end the process; the main thread then exits with ``code``.

        Nothing is saved if the main thread is not between two changes within ``seconds``.
        """
        with self._gate:
            self._end, self._code = threading.Event(), code
        until = time.monotonic() + seconds
        while not self._is_quiet and time.monotonic() < until:
            time.sleep(_PAUSE)
        if self._is_quiet and self.steps:
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            self._save_once(_step_save(callers(main)))
        self._end.set()

    def _begin_change(self) -> None:
        """Note that the main thread changes what a state contains."""
        with self._gate:
            self._is_quiet = self._end is not None
        self._leave_if_saved()

    def _leave_if_saved(self) -> None:
        if self._end is not None:
            self._end.wait()
            raise SystemExit(self._code)

    # --- failure -----------------------------------------------------------------------------------------------------

    def on_exception(self, problem: BaseException) -> None:
        """Save what can be saved. An interrupt that no patch handles ends the run as it does without patches."""
        if isinstance(problem, Exception):
            self.save_after(problem)

    def save_after(self, problem: BaseException, out_of_memory: str = "", restarts: bool = False) -> None:
        """Save what can be saved, once.

        ``out_of_memory``: the phase of such an error. ``restarts``: a state is enough, because the launcher restarts the run.
        """
        watch = ranks.watch()
        if watch is not None and not watch.is_consequence(problem):
            reason = f"out of memory ({out_of_memory}): " if out_of_memory else ""
            watch.fail(reason + first_line(problem), out_of_memory, self._keeps_state())
        elif watch is not None and (watch.failure is None or not watch.failure.keeps_state):
            return  # the processes that are left cannot save the state of all
        if not self.steps:
            return
        statements = None if restarts else _step_save(frame for frame, _ in traceback.walk_tb(problem.__traceback__))
        if out_of_memory:
            # Only the frames of the failed step still hold its tensors; saving needs that memory.
            traceback.clear_frames(problem.__traceback__)
            gc.collect()
        with printing():
            self._save_once(statements)

    def on_peer_failure(self, failure: ranks.Failure) -> None:
        """Save the last step after an error of another process, which waits for that."""
        if failure.keeps_state:
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            restarts = failure.out_of_memory and retry_request.path() is not None
            self._save_once(None if restarts else _step_save(callers(main)))

    def _keeps_state(self) -> bool:
        return self.intact and self.snapshot is not None and not ranks.is_sharded(self.accelerator)

    def _save_once(self, statements: StepSave | None) -> None:
        """Save in this thread, or wait until another thread has."""
        with self._lock:
            if not self._is_done:
                self._is_done = True
                self._save(statements)

    def _save(self, statements: StepSave | None) -> None:
        """Save in the first process; the others share their random state, and wait."""
        watch = ranks.watch()
        if watch is None or not self._keeps_state():
            self._save_here(statements, None)
            return
        assert self.snapshot is not None
        watch.share(f"{_PART}{watch.rank}", [self.snapshot.step, self.snapshot.part()])
        if watch.rank != 0:
            saved = watch.fetch(_SAVED, ranks.SAVING_TIMEOUT)
            self.states += [(self.snapshot.step, Path(saved))] if saved else []
            return
        shared = [watch.fetch(f"{_PART}{rank}", _PART_TIMEOUT) for rank in range(self.accelerator.num_processes)]
        self._save_here(statements, [part for step, part in filter(None, shared) if step == self.snapshot.step])
        watch.share(_SAVED, str(self.newest_state() or ""))

    def _save_here(self, statements: StepSave | None, parts: list[dict[str, Any]] | None) -> None:
        """Save in this process. ``parts``: what all processes share."""
        newest, step = self.newest_state() or "none", self.snapshot.step if self.snapshot is not None else self.steps
        if ranks.is_sharded(self.accelerator):
            kind = str(self.accelerator.distributed_type).rpartition(".")[2]
            warn(f"nothing is saved, because {kind} saves with all processes; newest state: {newest}")
        elif problem := gpu_problem(self.accelerator.device):
            warn(f"nothing is saved: the GPU cannot be used after this error ({problem}); newest state: {newest}")
        elif self.intact:
            self._save_state(parts)
            self._save_model(statements, f"after step {step}", step)
        else:
            warn(f"no state is saved, because step {step + 1} had begun to change the weights; newest state: {newest}")
            self._save_model(statements, f"after step {step}, with a part of step {step + 1}", step)

    def _save_state(self, parts: list[dict[str, Any]] | None) -> None:
        position, snapshot = resume.position(), self.snapshot
        if snapshot is None or position is None:
            warn("no state is saved, because no patch counts the position in the training data")
            return
        try:
            if not self._has_state(snapshot.step):
                position.restore(snapshot, parts)
                position.fix_random_state(snapshot.random)
                with not_waiting():
                    self.accelerator.save_state(
                        str(rolling_state(Path(self.args.output_dir), self.args.output_name, snapshot.step))
                    )
        except (Exception, SystemExit) as problem:  # NaN weights must not prevent the other messages
            warn(f"could not save the state: {first_line(problem)}")
        else:
            note(f"no steps lost: state after step {snapshot.step} saved in {self.newest_state()}")

    def _has_state(self, step: int) -> bool:
        """Return whether the script or another patch has saved the state of a step."""
        newest = self.states[-1:]
        return any(saved == step and state.is_dir() and resume.state_problem(state) is None for saved, state in newest)

    def _save_model(self, statements: StepSave | None, label: str, step: int) -> None:
        """Save the model, in the first process; as one file if its folder format fails."""
        if statements is None or not self.accelerator.is_main_process:
            return
        files = self._model_files(statements, step)
        if not files and statements.saves_folders:
            files = self._model_files(statements, step, as_file=True)
        if files:
            note(f"model {label} saved: {', '.join(map(str, files))}")

    def _model_files(self, statements: StepSave, step: int, as_file: bool = False) -> list[Path]:
        """Save the model; return its files, none if that failed."""
        try:
            with not_waiting(), written_files() as files:
                statements.run(step, self.args, self.accelerator, as_file)
        except (Exception, SystemExit) as problem:
            warn(f"could not save the model{' as one file' if as_file else ''}: {first_line(problem)}")
        return files


def _step_save(frames: Iterable[FrameType]) -> StepSave | None:
    """Return what saves the model in the training function among frames."""
    return next((saving for frame in frames if (saving := step_save(frame)) is not None), None)


def gpu_problem(device: Any) -> str:
    """Return why nothing can be read from the GPU any more, as after an illegal access; empty if it can."""
    if device.type != "cuda":
        return ""
    import torch

    try:
        torch.cuda.synchronize(device)
    except Exception as problem:
        return first_line(problem)
    return ""


def last_step() -> LastStep | None:
    """Return the last step of this process's run; None if the patch that saves it is off."""
    return current(LastStep)
