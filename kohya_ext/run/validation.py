"""Measure the validation loss with the same images, timesteps and noise in every validation.

The random state is set before each batch and each timestep from the seed and the numbers of both. So two validations of the
same weights are equal, whatever was drawn before. The callbacks of other patches get each evaluation.
"""

from __future__ import annotations

import contextlib
import random
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kohya_ext.console import note
from kohya_ext.patching.step_loss import callers, local_names, variables
from kohya_ext.patching.training_loop import TrainingCallback, validated
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import evaluations, resume
from kohya_ext.run.evaluations import Evaluation, Sample

INSTEAD_OF = "kohya_ext_instead_of"
"""Attribute of a dataset group that upstream's run lacks: upstream's own, or None."""

_STEP = "global_step"
"""The scripts' variable for the number of optimizer steps."""


@dataclass
class Validation(TrainingCallback):
    """Collects the losses of a run's validations."""

    args: Namespace
    accelerator: Accelerator
    images: Any
    """The dataset group of the validation images."""
    held_out: bool
    """Whether none of them is trained on."""
    seed: int
    evaluation: Evaluation | None = None
    """The last one."""
    _losses: dict[tuple[int, int], float] = field(default_factory=dict)
    """(Number of the batch, number of the timestep) -> loss."""
    _known: dict[tuple[int, int], float] = field(default_factory=dict)
    """The same -> timestep, which is the same in every validation; read in the first one."""
    _copied: Any = None
    """The timesteps of the loss that is computed, or a copy on its way from the GPU."""
    _batch: int | None = None
    """Number of the current batch; None outside of a validation."""
    _count: int = 0
    """Number of timesteps that were measured of the current batch."""

    def begin(self) -> None:
        """Begin a validation."""
        self.images.set_current_strategies()
        self.images.set_max_train_steps(self.args.max_train_steps)
        self.images.set_current_step(self.args.max_train_steps)  # captions as at the end of their warmup
        with preserved_random_state():
            self.images.set_current_epoch(1)
        self._losses = {}

    def load(self, index: int) -> Any:
        """Return a batch, and begin to measure it."""
        from accelerate.utils import send_to_device

        self._batch, self._count = index, 0
        self._set_seed()
        batch = send_to_device(self.images[index], self.accelerator.device)
        self._set_seed()  # of the noise, also where loading draws nothing because latents are cached
        return batch

    def record_timesteps(self, timesteps: Any) -> None:
        """Record the timesteps of the current batch, before its loss is known. Does nothing outside of a validation."""
        if self._batch is not None and (self._batch, self._count) not in self._known:
            self._copied = timesteps.detach().to("cpu", non_blocking=timesteps.is_cuda)

    def record_loss(self, loss: float) -> None:
        """Record a loss of the current batch. Does nothing outside of a validation."""
        if self._batch is None:
            return
        if self._copied is not None:  # complete, because the loss has been read since
            self._known[self._batch, self._count] = float(self._copied.float().mean())
            self._copied = None
        self._losses[self._batch, self._count] = loss
        self._count += 1
        self._set_seed()

    def finish(self, together: bool) -> None:
        """End a validation, and hand its evaluation to all callbacks. ``together``: each process has measured some batches."""
        self._batch = None
        samples = [Sample(place[0], self._known.get(place), loss) for place, loss in self._losses.items()]
        if together and self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            samples = _once(gather_object([samples]))
        frame = next((each for each in callers(sys._getframe(1)) if _STEP in local_names(each.f_code)), None)
        if frame is None:
            return
        loop = variables(frame)
        measured = evaluations.evaluation(loop[_STEP], loop["epoch"] + 1, samples, self.held_out)
        if measured is None or (self.evaluation is not None and self.evaluation.step == measured.step):  # after step and epoch
            return
        note(f"step {measured.step}: {measured.text(self.evaluation)}")
        self.evaluation = measured
        validated(measured)

    def _set_seed(self) -> None:
        import torch

        seed = self.seed + 1_000_003 * (self._batch or 0) + self._count
        torch.manual_seed(seed)
        random.seed(seed)


def _once(parts: Iterable[list[Sample]]) -> list[Sample]:
    """Return the samples of all processes; those of a batch that several have measured only once."""
    measured: list[Sample] = []
    for part in parts:
        known = {each.batch for each in measured}
        measured += [each for each in part if each.batch not in known]
    return measured


def paths(images: Any) -> set[str]:
    """Return the files of a dataset group."""
    return {image.absolute_path for each in images.datasets for image in each.image_data.values()}


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore all random states after the block."""
    state = resume.random_state()
    try:
        yield
    finally:
        resume.set_random_state(state)
