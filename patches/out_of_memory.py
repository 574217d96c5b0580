"""After an out-of-memory error, print the cheapest change that avoids it, or restart with it.

The patch save_on_failure saves the state, from which a change that keeps it resumes. The advice in a run of DeepSpeed is the
next of its own options.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from kohya_ext.config.settings import Option, Settings, count, one_of
from kohya_ext.console import error, note, printing, warn
from kohya_ext.gpu import out_of_memory
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Program, Stage, TrainingCallback, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.planning.memory_savings import TRAINING, Phase
from kohya_ext.run import journal, ranks, resume, retry_request
from kohya_ext.run.last_step import last_step
from kohya_ext.run.retry_request import RetryRequest

_REQUEST = "oom/request"
"""Key of the restart that the failed process shares with the others."""

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
class _Advice(TrainingCallback):
    args: Namespace
    accelerator: Accelerator
    program: Program
    stepping: bool = False
    """Whether the first step has begun."""

    def before_batch(self, accelerator: Accelerator) -> None:
        self.stepping = True

    def on_exception(self, problem: BaseException) -> None:
        """Print the error and what to change, if it is an out-of-memory error."""
        if not out_of_memory.is_out_of_memory(problem):
            return
        phase = out_of_memory.phase_of(problem, self.stepping)
        current, watch, last = resume.position(), ranks.watch(), last_step()
        step = f"step {current.step + (phase in TRAINING)}, " if current is not None and self.stepping else ""
        first = (str(problem).splitlines() or [type(problem).__name__])[0]
        process = f"{ranks.name(watch.rank)}, " if watch is not None else ""
        error(f"out of memory ({process}{step}{phase}): {first}")
        journal.event("out_of_memory", phase=phase, problem=first)
        error(out_of_memory.usage(self.accelerator.device))
        if last is not None:
            last.save_after(problem, phase, restarts=retry_request.path() is not None)
        if watch is not None:
            watch.fail(f"out of memory ({phase}): {first}", phase)
        with printing():
            request = self._advise(phase, last.newest_state() if last is not None else None)
        if watch is not None:
            watch.share(_REQUEST, request)

    def on_peer_failure(self, failure: ranks.Failure) -> None:
        """Restart with the change that another process requests after an out-of-memory error."""
        if not failure.out_of_memory or (watch := ranks.watch()) is None:
            return
        journal.event("out_of_memory", phase=failure.out_of_memory, problem=failure.reason)
        if (last := last_step()) is not None:
            last.on_peer_failure(failure)  # the other process waits for it
        request = watch.fetch(_REQUEST, ranks.SAVING_TIMEOUT)
        if (file := retry_request.path()) is not None and request is not None and not file.exists():
            retry_request.write(file, request)

    def _advise(self, phase: Phase, state: Path | None) -> RetryRequest | None:
        """Print what to change; return the restart that the launcher of each machine shall make, if any."""
        if ranks.is_deepspeed(self.accelerator):
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


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Advice:
    if settings[ON_OOM] == "retry" and retry_request.path() is None:
        warn("--on_oom retry needs the launcher to restart the script; run python -m kohya_ext SCRIPT ...")
    return _Advice(args, accelerator, program())


PATCH = Patch(
    name="out_of_memory",
    summary="after an out-of-memory error, print memory use and a command line with the cheapest change",
    targets=(),
    options=(ON_OOM, OOM_MAX_RETRIES),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://pytorch.org/docs/stable/notes/faq.html",
    stage=Stage.GUARD,
    on_start=_start,
)
