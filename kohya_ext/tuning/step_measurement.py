"""Measure the steps of a training script after its first ones, write the result and end the process.

A step's time ends when the script asks for the next batch: it has read the loss by then, so the GPU has finished the step.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from kohya_ext.gpu import out_of_memory, peak_memory
from kohya_ext.patching.training_loop import TrainingCallback, current_batch
from kohya_ext.patching.types import Accelerator
from kohya_ext.speed import switches
from kohya_ext.tuning.task import Task
from kohya_ext.units import index_of

#: The fewest and most measured steps, and the seconds after which no more are measured.
FEWEST, _MOST, _SECONDS = 5, 24, 20.0

#: The seconds after which the steps that are not measured end early, and their fewest.
_FIRST_SECONDS, _FEWEST_FIRST = 45.0, 4


@dataclass
class StepMeasurement(TrainingCallback):
    """The steps of this process."""

    args: Namespace
    accelerator: Accelerator
    task: Task
    steps: list[dict[str, float]] = field(default_factory=list)
    """``seconds``, ``images`` and ``waiting``, the seconds of waiting for data, of each measured step."""
    on_card: int = 0
    """The most bytes in use on the GPU at the end of a measured step, by all programs."""
    finished: int = 0
    """Optimizer steps."""
    _is_complete: bool = False
    """Whether the optimizer has stepped since the last mark."""
    _images: int = 0
    _waiting: float = 0.0
    _asked: float = 0.0
    """When the script asked for the current batch."""
    _first: float = 0.0
    """When the first step ended."""
    _mark: float = 0.0
    """When the last step ended."""
    _begun: float | None = None
    """When the first measured step began."""

    def before_data(self) -> None:
        """End the step, if the optimizer has stepped."""
        self._asked = time.perf_counter()
        if self._is_complete:
            self._end_step()

    def after_data(self) -> None:
        """Count the wait for a batch."""
        self._waiting += time.perf_counter() - self._asked

    def before_batch(self, accelerator: Accelerator) -> None:
        """Count the images."""
        weights = current_batch().get("loss_weights")
        self._images += len(weights) if weights is not None else int(getattr(self.args, "train_batch_size", 1))

    def after_batch(self, accelerator: Accelerator) -> None:
        """Note that the optimizer has stepped."""
        self._is_complete = self._is_complete or accelerator.sync_gradients

    def on_exception(self, problem: BaseException) -> None:
        """Write why the script ended."""
        self.task.write({"failed": failure(problem), "finished": self.finished})

    def _end_step(self) -> None:
        now = self._synchronized() if self._begun is None else time.perf_counter()
        self.finished += 1
        if self._begun is not None:
            self.steps.append({"seconds": now - self._mark, "images": self._images, "waiting": self._waiting})
            self.on_card = max(self.on_card, self._used())
        elif self._is_warm(now):
            self._begun = now
        self._first = self._first or now
        self._mark, self._images, self._waiting, self._is_complete = now, 0, 0.0, False
        if self._begun is not None and self._is_enough(now - self._begun):
            self._synchronized()
            self.task.write(self.result())
            sys.exit(0)

    def _is_warm(self, now: float) -> bool:
        is_slow = self._first > 0 and now - self._first > _FIRST_SECONDS and self.finished >= _FEWEST_FIRST
        return self.finished >= self.task.first or is_slow

    def _is_enough(self, seconds: float) -> bool:
        return len(self.steps) >= FEWEST and (len(self.steps) >= _MOST or seconds >= _SECONDS)

    def _synchronized(self) -> float:
        if self.accelerator.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()

    def _used(self) -> int:
        if self.accelerator.device.type != "cuda":
            return 0
        import torch

        free, total = torch.cuda.mem_get_info(index_of(self.accelerator.device))
        return int(total - free)

    def result(self) -> dict[str, Any]:
        """Return what was measured, as JSON data; sizes in bytes."""
        allocated, reserved = 0, 0
        if self.accelerator.device.type == "cuda":
            allocated, reserved = peak_memory.of_device(index_of(self.accelerator.device))
        return {
            "steps": self.steps,
            "allocated": allocated,
            "reserved": reserved,
            "on_card": self.on_card,
            "features": switches.added(),
            "machine": describe_machine(self.accelerator.device),
        }


def failure(problem: BaseException) -> str:
    """Return why a script ended, in one line."""
    from kohya_ext.errors import first_line

    return "out of memory" if out_of_memory.is_out_of_memory(problem) else first_line(problem)


def describe_machine(device: Any) -> dict[str, Any]:
    """Return what the measurements on a device depend on, as `kohya_ext.speed.proof` has it, and the device's memory."""
    if device.type != "cuda":
        return {}
    import torch

    from kohya_ext.speed import proof

    return {**proof.machine(device), "memory": torch.cuda.get_device_properties(index_of(device)).total_memory}


def start(args: Namespace, accelerator: Accelerator, task: Task) -> StepMeasurement:
    """Return the callback of a process that measures steps."""
    return StepMeasurement(args, accelerator, task)
