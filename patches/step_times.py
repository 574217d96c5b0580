"""Store the seconds per step, to predict the duration of the next run with the same settings."""

from __future__ import annotations

import atexit
import time
from argparse import Namespace
from dataclasses import dataclass

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import step_times

_WARM_UP = 2
"""Number of first steps left out, in which caches warm up and kernels are selected."""

_EARLY = 50
"""Number of steps before the time is first stored, in case the run is killed later."""


@dataclass
class _Clock(TrainingCallback):
    key: str
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

    def on_end(self) -> None:
        atexit.unregister(self.store)
        self.store()

    def store(self) -> None:
        measured = self.steps - _WARM_UP
        if measured > 0:
            step_times.store(self.key, (self.ended - self.began) / measured, measured)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Clock | None:
    key = step_times.current_key()
    if key is None or not accelerator.is_main_process:
        return None
    clock = _Clock(key)
    atexit.register(clock.store)
    return clock


PATCH = Patch(
    name="step_times",
    summary="store the seconds per step, to predict the duration of the next run with the same settings",
    targets=(),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://github.com/tqdm/tqdm",
    stage=Stage.OBSERVE,
    on_start=_start,
)
