"""``--resume`` goes on where the run was: step, epoch, batch and random state; ``--resume auto`` takes the newest whole state.

Upstream's full fine-tuning scripts count from zero again and see the epoch's data again; its LoRA scripts keep the epoch,
and make the wrong number of steps unless ``--skip_until_initial_step`` is given, and then on the first resume only.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import wraps
from pathlib import Path
from typing import Any

from kohya_ext import position, run_record
from kohya_ext.console import note, stop
from kohya_ext.errors import UserError
from kohya_ext.patching import Patch, Target
from kohya_ext.settings import Settings
from kohya_ext.training_loop import Stage


def _start(args: Namespace, accelerator: Any, settings: Settings) -> position.Position:
    run = run_record.current() or run_record.describe(Path(sys.argv[0]).name, args)
    if getattr(args, "resume", None) == position.AUTO:
        try:
            state = position.state_to_resume(Path(args.output_dir), args.output_name, run, settings.inexact_resume)
        except UserError as error:
            stop(str(error))
        args.resume = str(state) if state is not None else None
        if state is None:
            note(f"--resume auto: no state of this run in {args.output_dir}; starting from the beginning")
    earlier = run_record.read(Path(args.resume)) if getattr(args, "resume", None) else None
    if earlier is not None:
        run = run.continues(earlier)
        note(f"resuming from {args.resume}, step {earlier.step} of the run started {earlier.started}")
    elif getattr(args, "resume", None):
        note(f"resuming from {args.resume}")
    run_record.begin(run)
    return position.Position(args, accelerator)


def _load_state(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        _give_own_storage(self)
        folder = args[0] if args else kwargs.get("input_dir")
        if folder is not None and not settings.inexact_resume:
            problem = position.random_state_problem(Path(folder), self.process_index)
            if problem is not None:
                stop(
                    f"cannot resume exactly from {folder}: {problem}. Resume from another state, or add --inexact_resume to "
                    "go on with other random numbers"
                )
        return original(self, *args, **kwargs)

    return load_state


def _save_state(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        _give_own_storage(self)
        return original(self, *args, **kwargs)

    return save_state


def _give_own_storage(accelerator: Any) -> None:
    """Let no weight be a slice of a larger one: accelerate takes such for one weight with several names, and saves one.

    sd-scripts makes SDXL's second text encoder of slices (its query, key and value are one tensor in the checkpoint), so that
    upstream's states of ``--train_text_encoder`` lack weights, and cannot be loaded.
    """
    if str(accelerator.distributed_type).rpartition(".")[2] not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return  # sharded weights are slices for a reason
    for model in accelerator._models:
        for weight in model.parameters():
            if weight.untyped_storage().nbytes() > weight.numel() * weight.element_size():
                weight.data = weight.data.clone()


PATCH = Patch(
    name="honest_resume",
    summary="--resume goes on at the same step, epoch, batch and random state; --resume auto takes the newest whole state",
    targets=(
        Target("accelerate.accelerator", "Accelerator.load_state", _load_state, body="runs"),
        Target("accelerate.accelerator", "Accelerator.save_state", _save_state, body="runs"),
    ),
    exactness="exact",
    held_to="the run that was not interrupted: the same final tensors (fp32, one process)",
    idea="https://github.com/kohya-ss/sd-scripts/issues/1999",
    stage=Stage.COUNT,
    on_start=_start,
)
