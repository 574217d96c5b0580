"""Save the state after an out-of-memory error, and print the cheapest change that avoids it.

Upstream ends with a traceback and loses the steps since the last save. When forward or backward fail, weights and optimizer
are still intact. The state after the last complete step is saved with its random numbers, so that the resumed run equals the
uninterrupted one. No state is saved with fused optimizer steps.

With several processes, the failed one publishes its error and its random state, and waits. The optimizer of the others cannot
step without its gradients, so the first process saves the state in another thread, with the random state of every process.
With DeepSpeed no state is saved, because that takes all processes. Its advice is the next of DeepSpeed's own options.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kohya_ext.config.settings import Option, Settings, count, one_of
from kohya_ext.console import error, note, printing, warn
from kohya_ext.gpu import out_of_memory
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Program, Stage, TrainingCallback, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.planning.memory_savings import TRAINING, Phase
from kohya_ext.run import journal, ranks, resume, retry_request
from kohya_ext.run.atomic_write import fail_fast
from kohya_ext.run.output_files import rolling_state
from kohya_ext.run.retry_request import RetryRequest
from kohya_ext.sdscripts.constraints import fused_optimizer

#: Keys of the values that the processes share.
_PART, _SAVED, _REQUEST = "oom/part/", "oom/saved", "oom/request"

_PART_TIMEOUT = 30.0
"""Seconds that the first process waits for another one's random state."""

ON_OOM = Option(
    "on_oom",
    "stop",
    one_of("stop", "retry"),
    "after an out-of-memory error, stop or retry; retry restarts from the newest state with the cheapest change that helps "
    "(launcher only)",
    metavar="stop|retry",
)
OOM_MAX_RETRIES = Option(
    "oom_max_retries",
    3,
    count,
    "maximum number of restarts by --on_oom retry",
    metavar="N",
)


@dataclass
class _Watch(TrainingCallback):
    args: Namespace
    accelerator: Accelerator
    program: Program
    began: float = field(default_factory=time.time)
    stepping: bool = False
    """Whether the first step has begun."""
    snapshot: resume.Snapshot | None = None
    """Position after the last complete step."""
    ended: bool = False
    _before: Callable[..., Any] | None = None
    """``sys.excepthook`` before this run."""

    def listen(self) -> None:
        """Take over ``sys.excepthook``."""
        self._before, sys.excepthook = sys.excepthook, self.on_exception

    def on_end(self) -> None:
        """Restore ``sys.excepthook``, unless other code has replaced it since."""
        if sys.excepthook == self.on_exception and self._before is not None:
            sys.excepthook = self._before
        self.ended = True

    def on_exception(self, kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        """Report an uncaught exception if it is an out-of-memory error."""
        (self._before or sys.__excepthook__)(kind, problem, trace)
        if not self.ended and out_of_memory.is_out_of_memory(problem):
            try:
                self.report(problem)
            except Exception as other:  # the traceback is printed already
                warn(f"the memory report is incomplete: {type(other).__name__}: {other}")

    def before_batch(self, accelerator: Accelerator) -> None:
        self.stepping = True

    def after_batch(self, accelerator: Accelerator) -> None:
        current = resume.position()
        if accelerator.sync_gradients and current is not None:
            self.snapshot = current.snapshot()

    def report(self, problem: BaseException) -> None:
        """Save the state, and print the error and what to change."""
        phase = out_of_memory.phase_of(problem, self.stepping)
        current = resume.position()
        step = f"step {current.step + (phase in TRAINING)}, " if current is not None and self.stepping else ""
        first = (str(problem).splitlines() or [type(problem).__name__])[0]
        watch = ranks.watch()
        process = f"{ranks.name(watch.rank)}, " if watch is not None else ""
        error(f"out of memory ({process}{step}{phase}): {first}")
        journal.event("out_of_memory", phase=phase, problem=first)
        error(out_of_memory.usage(self.accelerator.device))
        can_save = self._can_save(phase)
        if watch is not None:
            watch.fail(f"out of memory ({phase}): {first}", phase, can_save)
        # Only the frames of the failed step still hold its tensors; saving needs that memory.
        traceback.clear_frames(problem.__traceback__)
        gc.collect()
        with printing():
            request = self._advise(phase, (self._save() if can_save else None) or self._newest_state())
        if watch is not None:
            watch.share(_REQUEST, request)

    def on_peer_failure(self, failure: ranks.Failure) -> None:
        """Save the state after an out-of-memory error of another process, and restart with the change that it requests."""
        if not failure.out_of_memory or (watch := ranks.watch()) is None:
            return
        journal.event("out_of_memory", phase=failure.out_of_memory, problem=failure.reason)
        if failure.keeps_state:
            self._save()
        request = watch.fetch(_REQUEST, ranks.SAVING_TIMEOUT)
        if (file := retry_request.path()) is not None and request is not None and not file.exists():
            retry_request.write(file, request)

    def _advise(self, phase: Phase, state: Path | None) -> RetryRequest | None:
        """Print what to change; return the restart that the launcher of each machine shall make, if any."""
        if ranks.is_deepspeed(self.accelerator):
            note(f"the failed step is lost, because DeepSpeed saves states with all processes; newest state: {state or 'none'}")
            note(f"add {_next_option(self.args)}, or reduce --train_batch_size")
            return None
        checkout, command = self.program.checkout, self.program.command
        if command.script is None or checkout is None:
            return None
        if predicted := out_of_memory.prediction(checkout, self.args, command):
            note(predicted)
        step = out_of_memory.next_step(self.args, command, phase, state is not None)
        for line in (
            out_of_memory.advice(step, state) if step is not None else ["no remaining option saves memory; use a larger GPU"]
        ):
            note(line)
        if phase == "sampling":
            note("or sample smaller images (--w 512 --h 512 in the prompt file), or remove --sample_prompts")
        if (file := retry_request.path()) is None or step is None:
            return None
        resume_from = str(state) if state is not None and step.saving.resumes else None
        request: RetryRequest = {
            "changes": dict(step.changes),
            "description": step.saving.what,
            "state": resume_from,
        }
        retry_request.write(file, request)
        return request

    def _can_save(self, phase: Phase) -> bool:
        """Return whether the weights are still those after the last complete step."""
        fused = fused_optimizer(self.args) is not None
        intact = phase in ("forward", "backward", "sampling") and not fused and not ranks.is_sharded(self.accelerator)
        return intact and self.snapshot is not None

    def _save(self) -> Path | None:
        """Save the state after the last complete step; return its folder, or None if that failed.

        With several processes all call this, and the first one saves.
        """
        current, snapshot, watch = resume.position(), self.snapshot, ranks.watch()
        if snapshot is None or current is None:
            return None
        if watch is None:
            return self._write(current, snapshot, None)
        watch.share(f"{_PART}{watch.rank}", [snapshot.step, snapshot.part()])
        if watch.rank != 0:
            saved = watch.fetch(_SAVED, ranks.SAVING_TIMEOUT)
            return Path(saved) if saved else None
        shared = [watch.fetch(f"{_PART}{rank}", _PART_TIMEOUT) for rank in range(self.accelerator.num_processes)]
        state = self._write(current, snapshot, [part for step, part in filter(None, shared) if step == snapshot.step])
        watch.share(_SAVED, str(state) if state is not None else "")
        return state

    def _write(self, current: resume.Position, snapshot: resume.Snapshot, parts: list[dict[str, Any]] | None) -> Path | None:
        state = rolling_state(Path(self.args.output_dir), self.args.output_name, snapshot.step)
        if state.is_dir() and state.stat().st_mtime >= self.began:  # not an earlier run's
            return state
        try:
            current.restore(snapshot, parts)
            current.fix_random_state()
            with fail_fast():
                self.accelerator.save_state(str(state))
        except (Exception, SystemExit) as problem:  # a full disk or NaN weights must not prevent the advice
            warn(f"could not save the state: {type(problem).__name__}: {problem}")
            return None
        note(f"no steps lost: state after step {snapshot.step} saved in {state}")
        return state

    def _newest_state(self) -> Path | None:
        """Return the newest state that this run saved, or else the state that it resumed from."""
        newest = resume.newest_state(Path(self.args.output_dir), self.args.output_name)
        if newest is not None and newest.stat().st_mtime >= self.began:
            return newest
        resumed = getattr(self.args, "resume", None)
        return Path(resumed) if resumed else None


def _next_option(args: Namespace) -> str:
    """Return the option of a DeepSpeed run that saves memory at the lowest cost in time."""
    unused = {
        "--gradient_checkpointing": not getattr(args, "gradient_checkpointing", False),
        "--zero_stage 2": args.zero_stage < 2,
        "--offload_optimizer_device cpu": args.offload_optimizer_device is None,
        "--zero_stage 3": args.zero_stage < 3,
        "--offload_param_device cpu": args.offload_param_device is None,
    }
    return next((option for option, is_unused in unused.items() if is_unused), "a GPU")


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Watch:
    if settings[ON_OOM] == "retry" and retry_request.path() is None:
        warn("--on_oom retry needs the launcher to restart the script; run python -m kohya_ext SCRIPT ...")
    watch = _Watch(args, accelerator, program())
    watch.listen()
    return watch


PATCH = Patch(
    name="out_of_memory",
    summary="after an out-of-memory error, save the state and print memory use and a command line with the cheapest change",
    targets=(),
    options=(ON_OOM, OOM_MAX_RETRIES),
    exactness="exact",
    held_to="the same run without the patch; resumed from the saved state, the uninterrupted run",
    idea="https://pytorch.org/docs/stable/notes/faq.html",
    stage=Stage.GUARD,
    on_start=_start,
)
