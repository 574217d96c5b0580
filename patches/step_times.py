"""Store the seconds per step, to predict the duration of the next run with the same settings, and correct those of others."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass

from kohya_ext.config.settings import Settings
from kohya_ext.estimate import machine, predict, step_time
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback, program
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import step_times
from kohya_ext.speed import switches
from kohya_ext.units import index_of

_WARM_UP = 2
"""Number of first steps left out, in which caches warm up and kernels are selected."""

_EARLY = 50
"""Number of steps before the time is first stored, in case the run is killed later."""


@dataclass
class _Clock(TrainingCallback):
    key: str
    gpu: str | None = None
    """The driver's name of the GPU, if the seconds of a step were predicted for it."""
    predicted: float = 0.0
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0

    def after_batch(self, accelerator: Accelerator) -> None:
        if not accelerator.sync_gradients:
            return
        self.ended = time.monotonic()
        self.steps += 1
        if self.steps == _WARM_UP:
            self.began = self.ended
        elif self.steps == _EARLY:
            self.store()

    def on_exit(self) -> None:
        self._finish()

    def on_end(self) -> None:
        self._finish()

    def _finish(self) -> None:
        self.store()
        measured = self.steps - _WARM_UP
        # A prediction is without what --speed adds.
        if self.gpu is not None and measured >= step_times.MIN_STEPS and not switches.added():
            machine.keep_ratio(self.gpu, (self.ended - self.began) / measured / self.predicted)

    def store(self) -> None:
        measured = self.steps - _WARM_UP
        if measured > 0:
            step_times.store(self.key, (self.ended - self.began) / measured, measured)


def _predicted(args: Namespace, accelerator: Accelerator) -> tuple[str, float] | None:
    """Return the GPU's name and the predicted seconds of a step; None unless both are known without measuring."""
    run = program()
    if run.checkout is None or accelerator.device.type != "cuda" or accelerator.num_processes > 1:
        return None
    import torch

    properties = torch.cuda.get_device_properties(index_of(accelerator.device))
    gpu = machine.of(properties.name, properties.total_memory)
    estimate = predict.known(run.checkout, args, run.command)
    if gpu is None or estimate is None or (time := step_time.by_rates(estimate, run.command, gpu)) is None:
        return None
    return properties.name, time.seconds


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Clock | None:
    key = step_times.current_key()
    if key is None or not accelerator.is_main_process:
        return None
    return _Clock(key, *(_predicted(args, accelerator) or ()))


PATCH = Patch(
    name="step_times",
    summary="store the seconds per step, to predict the duration of the next run with the same settings",
    targets=(),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://github.com/tqdm/tqdm",
    stage=Stage.OBSERVE,
    on_start=_start,
    observes=True,
    only_trains=True,
)
