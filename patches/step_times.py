"""The seconds of a step are kept, so that the next run with the same settings can say how long it will take."""

from __future__ import annotations

import atexit
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.run import step_times

_WARM_UP = 2
"""Steps that are not counted: caches fill, kernels are chosen."""

_EARLY = 50
"""After so many steps the measurement is kept for the first time: a run may be killed."""


@dataclass
class _Clock(TrainingCallback):
    key: str
    steps: int = 0
    began: float = 0.0
    ended: float = 0.0

    def after_batch(self, accelerator: Any) -> None:
        if not accelerator.sync_gradients:
            return
        self.ended = time.monotonic()
        self.steps += 1
        if self.steps == _WARM_UP:
            self.began = self.ended
        elif self.steps == _EARLY:
            self.keep()

    def on_end(self) -> None:
        atexit.unregister(self.keep)
        self.keep()

    def keep(self) -> None:
        measured = self.steps - _WARM_UP
        if measured > 0:
            step_times.store(self.key, (self.ended - self.began) / measured, measured)


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Clock | None:
    key = step_times.current_key()
    if key is None or not accelerator.is_main_process:
        return None
    clock = _Clock(key)
    atexit.register(clock.keep)
    return clock


PATCH = Patch(
    name="step_times",
    summary="the seconds of a step are kept, so that the next run with the same settings says how long it will take",
    targets=(),
    exactness="exact",
    held_to="the same run without it",
    idea="https://github.com/tqdm/tqdm",
    stage=Stage.OBSERVE,
    on_start=_start,
)
