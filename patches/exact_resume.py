"""Continue ``--resume`` at the same step, epoch, batch and random state. ``--resume auto`` picks the newest complete state.

Upstream's full fine-tuning scripts restart the step count and the epoch's data. Its LoRA scripts keep the epoch but train the
wrong number of steps without ``--skip_until_initial_step``, and with it skip correctly on the first resume only.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import note, stop
from kohya_ext.errors import UserError
from kohya_ext.patching.patch import Patch, Target, takes
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import log_links, ranks, resume, run_record
from kohya_ext.run.atomic_write import folders_elsewhere
from kohya_ext.run.loaded_parts import OPTIMIZER, SCHEDULER
from kohya_ext.run.run_record import RunRecord
from kohya_ext.sdscripts.constraints import MASTERS

INEXACT_RESUME = Option(
    "inexact_resume",
    False,
    boolean,
    "resume even if the random state cannot be restored; the result then differs from an uninterrupted run",
)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> resume.Position:
    run = run_record.current() or run_record.describe(Path(sys.argv[0]).name, args)
    if getattr(args, "resume", None) == resume.AUTO:
        args.resume = _newest_state(args, accelerator, run, settings)
    _check_machines(args, accelerator)
    earlier = run_record.read(Path(args.resume)) if getattr(args, "resume", None) else None
    if earlier is not None:
        run = run.as_continuation_of(earlier)
        note(f"resuming from {args.resume}, step {earlier.step} of the run started {earlier.started}")
    elif getattr(args, "resume", None):
        note(f"resuming from {args.resume}")
    if getattr(args, "resume", None) and not getattr(args, "max_train_epochs", None):  # else its steps are not known yet
        _exit_if_finished(Path(args.resume), args)
    run_record.begin(run)
    return resume.Position(args, accelerator, "--disable_patch exact_resume")


def _newest_state(args: Namespace, accelerator: Accelerator, run: RunRecord, settings: Settings) -> str | None:
    """Return the state for ``--resume auto``, which the first process chooses for all."""
    state, problem = None, ""
    if accelerator.is_main_process:
        try:
            state = resume.state_to_resume(
                *(Path(args.output_dir), args.output_name, run, settings[INEXACT_RESUME]),
                folders_elsewhere(settings["fallback_dir"]),
            )
        except UserError as error:
            problem = str(error)
    if accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        state, problem = broadcast_object_list([state, problem])
    if problem:
        stop(problem)
    if state is None:
        note(f"--resume auto: no state of this run in {args.output_dir}; starting a new run")
    return str(state) if state is not None else None


def _check_machines(args: Namespace, accelerator: Accelerator) -> None:
    """Exit if a machine lacks the state to resume: its processes would fail, and the others wait for them."""
    state = getattr(args, "resume", None)
    if not state or accelerator.num_processes == 1 or getattr(args, "resume_from_huggingface", False):
        return
    is_missing = not Path(state).is_dir()
    if ranks.largest(accelerator, is_missing):
        stop(
            f"{ranks.name(accelerator.process_index)} has no {state}; use an --output_dir that all machines share, "
            "or copy the state to each machine"
            if is_missing
            else f"another machine has no {state}"
        )


def _load_state(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def load_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        folder = args[0] if args else kwargs.get("input_dir")
        current = resume.position()
        if current is not None and folder is not None:
            _exit_if_finished(Path(folder), current.args)
        if folder is not None and (problem := resume.unreadable(Path(folder))) is not None:
            stop(f"cannot resume: {problem}")
        if folder is not None and not settings[INEXACT_RESUME]:
            problem = resume.random_state_problem(Path(folder), self.process_index)
            if problem is not None:
                stop(
                    f"cannot resume exactly from {folder}: {problem}; resume from another state, or add --inexact_resume to "
                    "continue with different random numbers"
                )
        resume.allow_numpy_states()
        result = original(self, *args, **kwargs)
        if current is not None and folder is not None:
            current.keep_loaded(Path(folder))
        return result

    return load_state


def _exit_if_finished(state: Path, args: Namespace) -> None:
    """Exit with code 0 if this run has written its final model."""
    model = resume.finished_model(state, args)
    if model is not None:
        note(f"this run is finished: {model} was written after {state.name}; increase --max_train_steps to train on")
        raise SystemExit(0)


def _prepare_optimizer(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def prepare_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_late_state(OPTIMIZER, self._optimizers, original(self, *args, **kwargs))

    return prepare_optimizer


def _prepare_scheduler(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def prepare_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_late_state(SCHEDULER, self._schedulers, original(self, *args, **kwargs))

    return prepare_scheduler


def _with_late_state(kind: str, registered: list[Any], prepared: Any) -> Any:
    current = resume.position()
    if current is not None and registered and registered[-1] is prepared:
        current.add_late(kind, len(registered) - 1, prepared)
    return prepared


def _load_optimizer(original: Any, settings: Settings) -> Any:
    """Load states in the types in which the optimizer keeps them, such as Adafactor's float32 averages of bf16 weights."""

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        from kohya_ext.optimizers import saved_states

        saved_states.load(self.optimizer, partial(original, self), state_dict, settings[MASTERS])

    return load_state_dict


def _init_trackers(original: Any, settings: Settings) -> Any:
    """Load the state in LECO's scripts, which have prepared everything and are about to begin their loop."""

    @wraps(original)
    def init_trackers(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if (current := resume.position()) is not None:
            current.resume_without_loader()
        return result

    return init_trackers


def _load_control_net(original: Any, settings: Settings) -> Any:
    """Let accelerate load a state into SDXL's ControlNet.

    accelerate expects the missing names as the result; upstream's method returns nothing. By default it also replaces the
    parameters, but the optimizer keeps training the old ones.
    """

    @wraps(original)
    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, assign: bool | None = None) -> Any:
        if assign is not None:
            return original(self, state_dict, strict, assign)
        from torch.nn.modules.module import _IncompatibleKeys

        original(self, state_dict, strict=True, assign=False)
        return _IncompatibleKeys([], [])

    return load_state_dict


def _load_blocks(original: Any, settings: Settings) -> Any:
    """Let LyCORIS's DyLoRA load what it saves: each weight as one tensor, although its parameters are blocks of ranks.

    Without it, a resume ends with missing parameters, and ``--network_weights`` trains from zero.
    """

    @wraps(original)
    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> Any:
        for saved, name, dimension in (("lora_up.weight", "up_list", 1), ("lora_down.weight", "down_list", 0)):
            whole = state_dict.pop(f"{prefix}{saved}", None)
            if whole is not None:
                blocks = whole.flatten(1).split(self.block_size, dimension)
                state_dict.update((f"{prefix}{name}.{number}", block) for number, block in enumerate(blocks))
        return original(self, state_dict, prefix, *args, **kwargs)

    return _load_from_state_dict


def _clean(original: Any, settings: Settings) -> Any:
    """Keep weights that accelerate removes from a state because they share memory.

    In SDXL's second text encoder, query, key and value are slices of one checkpoint tensor. Accelerate treats them as one
    weight with three names, so upstream's states of ``--train_text_encoder`` lack two of them. The original still runs and logs
    the removal, because rich draws a random number for that line.
    """

    @wraps(original)
    def clean_state_dict_for_safetensors(state_dict: Any) -> Any:
        cleaned = original(dict(state_dict))
        removed = state_dict.keys() - cleaned.keys()
        # In the model's order. Copied, because safetensors rejects tensors that share memory; to the host, because the GPU
        # may be full.
        return {name: value.to("cpu", copy=True) if name in removed else cleaned[name] for name, value in state_dict.items()}

    return clean_state_dict_for_safetensors


def _load_model(original: Any, settings: Settings) -> Any:
    """Replace slices by separate tensors during the load, because safetensors rejects models that share memory.

    Afterwards they share memory again, so that the next state logs the same lines as in an uninterrupted run.
    """

    @wraps(original)
    def load_model(model: Any, *args: Any, **kwargs: Any) -> Any:
        slices = [(weight, weight.data) for weight in model.parameters() if _is_slice(weight)]
        for weight, data in slices:
            weight.data = data.clone()
        result = original(model, *args, **kwargs)
        for weight, data in slices:
            data.copy_(weight.data)
            weight.data = data
        return result

    return load_model


def _is_slice(weight: Any) -> bool:
    return bool(weight.untyped_storage().nbytes() > weight.numel() * weight.element_size())


PATCH = Patch(
    name="exact_resume",
    summary="continue --resume at the same step, epoch, batch and random state; --resume auto picks the newest complete state",
    targets=(
        Target("accelerate.accelerator", "Accelerator.load_state", _load_state, body="runs"),
        Target("accelerate.accelerator", "Accelerator.prepare_optimizer", _prepare_optimizer, takes("self"), body="runs"),
        Target("accelerate.accelerator", "Accelerator.prepare_scheduler", _prepare_scheduler, takes("self"), body="runs"),
        Target(
            "accelerate.optimizer",
            "AcceleratedOptimizer.load_state_dict",
            _load_optimizer,
            takes("self", "state_dict"),
            body="runs",
        ),
        Target("accelerate.checkpointing", "load_model", _load_model, takes("model"), body="runs"),
        Target("accelerate.utils.other", "clean_state_dict_for_safetensors", _clean, takes("state_dict"), body="runs"),
        Target(
            "library.sdxl_original_control_net",
            "SdxlControlNet.load_state_dict",
            _load_control_net,
            takes("self", "state_dict", "strict", "assign", exactly=True),
            body="runs",
        ),
        Target(
            "lycoris.modules.dylora",
            "DyLoraModule._load_from_state_dict",
            _load_blocks,
            takes("self", "state_dict", "prefix"),
            optional=True,
            body="runs",
        ),
        Target("library.logging_util", "init_trackers", _init_trackers, body="runs"),
        Target(
            "rich._log_render",
            "LogRender.__call__",
            log_links.record,
            takes("self", "console", "renderables"),
            body="runs",
            wanted=lambda settings: log_links.draw_random_numbers(),
            optional=True,
        ),
    ),
    options=(INEXACT_RESUME,),
    exactness="exact",
    held_to="the final tensors of an uninterrupted run (fp32, one process)",
    idea="https://github.com/kohya-ss/sd-scripts/issues/1999",
    stage=Stage.COUNT,
    on_start=_start,
    only_trains=True,
)
