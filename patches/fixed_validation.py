"""Validate the LoRA scripts with the same images, timesteps and noise each time.

Upstream's data loader workers shuffle the validation images by the epoch, and the noise depends on their order, so upstream's
losses of the same weights differ between epochs. The images are loaded in this process, which also saves the start of workers.
Upstream still computes the losses and writes them to the trackers.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch, moved, takes
from kohya_ext.patching.step_loss import callers, local_names, variables
from kohya_ext.patching.training_loop import Stage, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.run.validation import INSTEAD_OF, Validation, paths, preserved_random_state


class _LoraValidation(Validation):
    """Replaces the batches of the validation loader, and records upstream's losses."""

    def other_batches(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield this process's part of the validation batches, in the same order each time."""
        with preserved_random_state():
            self.begin()
            for index in self._own():
                yield self.load(index)
        self.finish(together=True)

    def _own(self) -> list[int]:
        """Return the numbers of this process's batches, as many as every other process has."""
        processes, count = self.accelerator.num_processes, len(self.images)
        each = math.ceil(count / processes)
        limit = self.args.max_validation_steps
        each = each if limit is None else min(each, limit)
        return [(self.accelerator.process_index + processes * number) % count for number in range(each)]


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _LoraValidation | None:
    frame = next((each for each in callers(sys._getframe(1)) if "val_dataloader" in local_names(each.f_code)), None)
    if frame is None:
        return None
    local = variables(frame)
    images = local.get("val_dataset_group")
    if images is None or not len(images):
        return None
    held_out = paths(images).isdisjoint(paths(local["train_dataset_group"]))
    if not held_out and settings["validation_split"] and not hasattr(images, INSTEAD_OF):
        unseeded = "draws two splits; add --validation_seed 1"
        reason = unseeded if args.validation_seed is None else "rounds both numbers up; another --validation_split may not"
        warn(f"some validation images are also trained on, because upstream {reason}")
    elif not held_out:
        note("no held-out images: the loss of a few training images measures memorisation only partly")
    seed = next(each for each in (args.validation_seed, args.seed, 0) if each is not None)
    return _LoraValidation(args, accelerator, images, held_out, seed)


def _add(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def add(self: Any, *, epoch: int, step: int, loss: float) -> None:
        original(self, epoch=epoch, step=step, loss=loss)
        if (validation := current(_LoraValidation)) is not None:
            validation.record_loss(loss)

    return add


def _huber(original: Any, settings: Settings) -> Any:
    """Record the timesteps in the function that all scripts call with them."""

    @wraps(original)
    def get_huber_threshold_if_needed(args: Any, timesteps: Any, *rest: Any, **kwargs: Any) -> Any:
        if (validation := current(Validation)) is not None:
            validation.record_timesteps(timesteps)
        return original(args, timesteps, *rest, **kwargs)

    return get_huber_threshold_if_needed


PATCH = Patch(
    name="fixed_validation",
    summary="validate with the same images, timesteps and noise each time, and print the standard error of the loss",
    targets=(
        *moved("LossRecorder.add", "library.logging_util", _add, takes("self", "epoch"), body="runs"),
        *moved("get_huber_threshold_if_needed", "library.loss", _huber, takes("args", "timesteps"), body="runs"),
    ),
    exactness="exact",
    held_to="the weights of a run without it, and equal losses for equal weights",
    idea="https://github.com/kohya-ss/sd-scripts/pull/1638",
    stage=Stage.RECORD,
    on_start=_start,
)
