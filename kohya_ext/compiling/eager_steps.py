"""The eager steps before a model is recorded. They measure what there is to gain, and the memory of a step's other work.

- A replay spares the host. If the GPU is the limit, it finishes long after the host has launched its work, and a recording
  costs five passes and memory for nothing.
- Recordings keep the memory of the passes. Everything else in a step, such as the VAE if latents are not cached and the
  optimizer, needs memory next to them, which it shares with the passes in an eager step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

#: Steps before the first measured one: it creates the optimizer's state.
FIRST = 1

#: Steps whose passes are timed.
TIMED = 2

#: The GPU's seconds for both passes, divided by the host's, above which launching does not limit a step.
BUSY = 1.1


#: Reserved bytes for each byte of tensors: the allocator cannot use all of its memory.
FRAGMENTED = 1.1


class Clock(Protocol):
    """Measures time on the host and on a device."""

    def mark(self) -> Any:
        """Return a mark of the present, on the host and behind the device's queued work."""

    def seconds(self, start: Any, end: Any) -> tuple[float, float]:
        """Return the seconds between two marks, on the host and on the device; waits for the device."""


class Meter(Protocol):
    """Measures the memory of temporary tensors on a device."""

    def begin(self) -> None:
        """Begin to measure."""

    def end(self) -> int:
        """Return the bytes of tensors at their peak since :meth:`begin`, beyond those that are left."""


@dataclass
class EagerSteps:
    """Measures the first steps of a run: one that creates the optimizer's state, timed ones, and one for the memory."""

    clock: Clock
    meter: Meter
    timed: int = TIMED
    """The number of timed steps; 0 to record in any case."""
    needed: int = 0
    """Bytes that a step needs next to the model's passes."""
    _steps: int = 0
    _passes: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all of these steps have run."""
        return self._steps > FIRST + self.timed

    @property
    def _measures_memory(self) -> bool:
        return self._steps == FIRST + self.timed

    def before_batch(self) -> None:
        """Begin a micro-batch."""
        if self._measures_memory:
            self.meter.begin()

    def run(self, forward: Callable[[], Any]) -> Any:
        """Return the model's output, and measure its passes."""
        if self._measures_memory:
            self._measure()
        start = self.clock.mark() if FIRST <= self._steps < FIRST + self.timed else None
        output = forward()
        tensor = getattr(output, "sample", output)
        if getattr(tensor, "requires_grad", False) and (start is not None or self._measures_memory):
            queue = torch.autograd.Variable._execution_engine.queue_callback
            tensor.register_hook(lambda gradient: queue(partial(self._after_backward, start)))
        return output

    def after_batch(self, stepped: bool) -> None:
        """End a micro-batch; ``stepped``: whether the optimizer has stepped."""
        if self._measures_memory:
            self._measure()
        self._steps += stepped

    def seconds(self) -> tuple[float, float] | None:
        """Return the host's and the GPU's seconds for both passes of the micro-batch that the host launched fastest."""
        return min((self.clock.seconds(*marks) for marks in self._passes), default=None)

    def _measure(self) -> None:
        self.needed = max(self.needed, int(self.meter.end() * FRAGMENTED))

    def _after_backward(self, start: Any) -> None:
        if start is None:
            self.meter.begin()
        else:
            self._passes.append((start, self.clock.mark()))
