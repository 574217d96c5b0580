"""The steps of a dry run: their phases, their end, and the result."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kohya_ext.dry_run.device import is_on_gpu
from kohya_ext.dry_run.repetition import repeated
from kohya_ext.dry_run.request import Request, end
from kohya_ext.dry_run.tracking import GpuTracker
from kohya_ext.estimate.allocator import CachingAllocator, ExpandableAllocator, minimum_reserved
from kohya_ext.estimate.events import Kind, peak
from kohya_ext.estimate.seconds import Work
from kohya_ext.estimate.tracker import BACKWARD, FORWARD, STEP

#: The phases before the first batch, which loads and caches, and between steps.
START, SAMPLING = "start", "sampling"


@dataclass
class Steps:
    """The steps that a tracker has logged so far."""

    tracker: GpuTracker
    request: Request
    file: Path
    """The result."""
    check: Callable[[], None] = lambda: None
    """Raises UserError if the log is of no use."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """Events and FLOPs at the beginning of each backward pass."""
    work: list[Work] = field(default_factory=list)
    """The kernels before each backward pass, since the one before."""
    optimizers: dict[int, Any] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)
    """The phases that optimizers have interrupted."""

    def install(self) -> None:
        """Follow data loaders, backward passes and optimizers for the rest of the process."""
        self.tracker.phase = START
        backward, iterate = torch.Tensor.backward, torch.utils.data.DataLoader.__iter__

        def run_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and kwargs.get("gradient") is None:  # a loss has none, and a pass that is recorded has one
                self._begin_pass()
            self.tracker.mark_saved()
            with self.tracker.during(BACKWARD):
                return backward(loss, *args, **kwargs)

        def begin_batches(loader: Any) -> Any:
            self.tracker.phase = FORWARD
            return iterate(loader)

        torch.Tensor.backward, torch.utils.data.DataLoader.__iter__ = run_backward, begin_batches
        if self.request.sampled:
            self._name_sampling()
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(self._end_step)

    def _name_sampling(self) -> None:
        accumulate = accelerate.Accelerator.accumulate

        def begin_batch(*args: Any, **kwargs: Any) -> Any:
            self.tracker.phase = FORWARD
            return accumulate(*args, **kwargs)

        accelerate.Accelerator.accumulate = begin_batch

    def _begin_pass(self) -> None:
        self.passes.append((len(self.tracker.events), self.tracker.flops))
        self.work.append(self.tracker.take_work())
        if len(self.passes) > self.request.passes or self._repeats():
            self.check()
            self.file.write_text(json.dumps(self.result()), encoding="utf-8")
            end(0)
        self.tracker.phase = FORWARD

    def _repeats(self) -> bool:
        """Add the last step of the log from the one before, instead of running it, if this one repeats itself.

        The first step creates the optimizer's state, and the third one records passes.
        """
        steps, micro_steps, tracker = self.request.passes, self.request.micro_steps, self.tracker
        if self.request.recorded or len(self.passes) <= steps - micro_steps:
            return False
        self._name_kinds()
        (start, flops), end = self.passes[-1 - micro_steps], len(tracker.events)
        step = repeated(tracker.events, start, len(tracker.kinds))
        if step is None:
            return False
        tracker.kinds += [tracker.kinds[event.storage] for event in tracker.events[start:] if event.bytes > 0]
        tracker.events += step
        later = self.passes[-micro_steps:]
        self.passes += [(end + last - start, 2 * done - flops) for last, done in later]
        return True

    def _begin_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        self.phases.append(self.tracker.phase)
        self.tracker.phase = STEP
        self._mark((parameter.grad for parameter in _parameters(optimizer)), Kind.GRADIENT)

    def _end_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        phase = self.phases.pop()
        self.tracker.phase = SAMPLING if self.request.sampled and phase == FORWARD else phase

    def result(self) -> dict[str, Any]:
        """Return the fields of an :class:`Estimate`, and the peaks after each pass."""
        self._name_kinds()
        kind = ExpandableAllocator if self.request.expandable_segments else CachingAllocator
        allocator, first, passes = kind(), 0, []
        for last, _ in self.passes:
            allocator.replay(self.tracker.events[first:last])
            passes.append({"allocated": max(allocator.peaks.values()), "reserved": allocator.most_reserved})
            first = last
        memory = passes[-1]
        measured = self.request.micro_steps if self.request.recorded else len(self.work) - 1  # before passes are recorded
        tensors = peak(self.tracker.events, self.tracker.kinds)
        trained = {id(each): each.numel() for optimizer in self.optimizers.values() for each in _parameters(optimizer)}
        return {
            **memory,
            "minimum_reserved": minimum_reserved(self._replay, memory["allocated"], memory["reserved"], kind),
            "peak_phase": tensors.phase,
            "parts": {kind.value: size for kind, size in tensors.parts.items()}
            | {"rounding": memory["allocated"] - tensors.bytes},
            "phase_peaks": allocator.peaks,
            "flops": self.passes[measured][1] - self.passes[measured - self.request.micro_steps][1],
            "work": self.work[measured].as_row(),
            "recorded_kernels": self.tracker.recorded_kernels,
            "trainable_parameters": sum(trained.values()),
            "trained_tensors": len(trained),
            "passes": passes,
        }

    def _replay(self, allocator: CachingAllocator) -> None:
        allocator.replay(self.tracker.events)

    def _name_kinds(self) -> None:
        """Give the storages of parameters and of the optimizers' states their kinds."""
        parameters = [each for each in gc.get_objects() if isinstance(each, torch.nn.Parameter)]
        self._mark((each for each in parameters if not each.requires_grad), Kind.WEIGHT)
        self._mark((each for each in parameters if each.requires_grad), Kind.TRAINED_WEIGHT)
        for optimizer in self.optimizers.values():
            values = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
            self._mark(values, Kind.OPTIMIZER_STATE)

    def _mark(self, tensors: Iterator[Any], kind: Kind) -> None:
        self.tracker.mark((tensor for tensor in tensors if is_on_gpu(tensor)), kind)


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]
