"""Continue training after a failed sample or validation, with a warning.

They train nothing, but upstream ends the run: for an unreadable prompt, a full disk or too little memory for a large image. A
failed image is left out; the random state and the devices of the models are those from before it. Where all processes take
part (DeepSpeed, FSDP, a validation in several processes), the others would wait for this one, so the run ends as before.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import warn
from kohya_ext.errors import first_line
from kohya_ext.patching.attributes import Replacement, replace_attribute
from kohya_ext.patching.patch import Patch, Target, moved, takes
from kohya_ext.patching.step_loss import callers, local_names, variables
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks, resume
from kohya_ext.run.last_step import gpu_problem

_SAMPLING, _VALIDATION = "sampling", "validation"

_ONE = "sample_image_inference"
"""End of the names of the functions that sample one prompt."""

_VALIDATION_LOOP = "_run_validation_loop"
"""The trainer's method that validates since sd-scripts v0.11."""


def _or_warning(what: str, accelerator: Accelerator, action: Callable[[], Any], models: Any = (), is_last: bool = True) -> Any:
    """Return the result of an action; None with a warning if it fails.

    ``models``: values with models that it moves. ``is_last``: training continues after it, and not another sample.
    """
    state, devices = resume.random_state(), [(module, _device(module)) for module in _modules(models)]
    try:
        return action()
    except Exception as problem:
        together = ranks.is_sharded(accelerator) or (what == _VALIDATION and accelerator.num_processes > 1)
        if together or gpu_problem(accelerator.device):
            raise
        warn(f"{what} failed, training continues without it: {first_line(problem)}")
    # After the exception has been forgotten, and with it the tensors of its frames.
    gc.collect()
    resume.set_random_state(state)
    for module, device in devices:
        _restore(module, device, is_last)
    return None


def _modules(values: Any) -> Iterator[Any]:
    from torch.nn import Module

    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _modules(value)
        elif isinstance(value, Module):
            yield value


def _device(module: Any) -> Any:
    return next((weight.device for weight in module.parameters()), None)


def _restore(module: Any, device: Any, is_last: bool) -> None:
    """Move a model back. One of --blocks_to_swap moves its own blocks, and may have begun to."""
    if not getattr(module, "blocks_to_swap", None):
        if device is not None and _device(module) != device:
            module.to(device)
        return
    for moves in (getattr(value, "futures", {}) for value in vars(module).values()):
        while moves:
            with contextlib.suppress(Exception):
                moves.popitem()[1].result()
    if is_last and hasattr(module, "switch_block_swap_for_training"):
        module.switch_block_swap_for_training()
    else:
        module.prepare_block_swap_before_forward()


def _samples(args: Namespace) -> bool:
    """Return whether a run samples at all: the scripts call their function after every step."""
    return any(getattr(args, name, None) for name in ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first"))


@dataclass
class _Evaluations(TrainingCallback):
    """The methods of a trainer that sample and validate."""

    args: Namespace
    accelerator: Accelerator
    replaced: list[Replacement] = field(default_factory=list)
    failed: bool = False
    """Whether the validation of the current step has failed."""

    def guard(self, trainer: Any) -> None:
        """Replace a trainer's methods. Before v0.11 its training function validates, with these two."""
        for name, what in (("sample_images", _SAMPLING), (_VALIDATION_LOOP, _VALIDATION)):
            if hasattr(trainer, name):
                self.replaced.append(replace_attribute(trainer, name, self._guarded(what, getattr(trainer, name))))
        if not hasattr(trainer, _VALIDATION_LOOP) and hasattr(trainer, "process_batch"):
            self.replaced.append(replace_attribute(trainer, "process_batch", self._validated(trainer.process_batch)))

    def _guarded(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if what == _SAMPLING and not _samples(self.args):
                return method(*args, **kwargs)
            return _or_warning(what, self.accelerator, partial(method, *args, **kwargs), (*args, *kwargs.values()))

        return guarded

    def _validated(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def process_batch(*args: Any, is_train: bool = True, **kwargs: Any) -> Any:
            if is_train:
                return method(*args, is_train=True, **kwargs)
            loss = None
            if not self.failed:
                action = partial(method, *args, is_train=False, **kwargs)
                loss = _or_warning(_VALIDATION, self.accelerator, action, args)
                self.failed = loss is None
            return loss if loss is not None else _not_a_number()

        return process_batch

    def before_batch(self, accelerator: Accelerator) -> None:
        self.failed = False

    def other_batches(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield validation batches until one cannot be loaded."""
        drawn = batches()
        while (batch := _or_warning(_VALIDATION, self.accelerator, lambda: next(drawn, None))) is not None:
            yield batch

    def on_end(self) -> None:
        """Restore the trainer's methods."""
        while self.replaced:
            self.replaced.pop().undo()


def _not_a_number() -> Any:
    import torch

    return torch.tensor(math.nan)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Evaluations:
    evaluations = _Evaluations(args, accelerator)
    functions = (each for each in callers(sys._getframe(1)) if "prepare_accelerator" in each.f_code.co_names)
    frame = next((each for each in functions if "self" in local_names(each.f_code)), None)
    if frame is not None:
        evaluations.guard(variables(frame)["self"])
    return evaluations


def _sample(original: Any, settings: Settings) -> Any:
    """Wrap a function that samples, whose first argument is the accelerator."""

    @wraps(original)
    def sample(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if not any(isinstance(value, Namespace) and _samples(value) for value in values):
            return original(*args, **kwargs)
        accelerator = next(value for value in values if hasattr(value, "num_processes"))
        is_last = not original.__name__.endswith(_ONE)
        return _or_warning(_SAMPLING, accelerator, partial(original, *args, **kwargs), values, is_last)

    return sample


def _of_family(module: str, function: str = _ONE) -> tuple[Target, ...]:
    """Return the functions of a family that sample one prompt and all prompts."""
    names = (function, "sample_images")
    return tuple(Target(module, name, _sample, takes("accelerator"), body="runs") for name in names)


PATCH = Patch(
    name="sampling_failures",
    summary="continue training after a failed sample or validation, with a warning",
    targets=(
        *moved(_ONE, "library.sampling", _sample, takes("accelerator"), body="runs"),
        *moved("sample_images_common", "library.sampling", _sample, takes("pipe_class", "accelerator"), body="runs"),
        *_of_family("library.flux_train_utils"),
        *_of_family("library.sd3_train_utils"),
        *_of_family("library.lumina_train_util"),
        *_of_family("library.anima_train_utils", f"_{_ONE}"),
    ),
    exactness="exact",
    held_to="the same run without the patch, when no sample and no validation fails; otherwise the run without them",
    idea="https://github.com/kohya-ss/sd-scripts/issues/1999",
    stage=Stage.VALIDATE,
    in_dry_runs=False,
    on_start=_start,
)
