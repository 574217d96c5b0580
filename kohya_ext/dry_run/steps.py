"""The steps of a dry run: their phases, their end, and the result."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from kohya_ext.dry_run.allocator import CachingAllocator, ExpandableAllocator, minimum_reserved
from kohya_ext.dry_run.device import is_on_gpu
from kohya_ext.dry_run.events import Kind, peak
from kohya_ext.dry_run.gpu_tracker import GpuTracker
from kohya_ext.dry_run.repetition import repeated
from kohya_ext.dry_run.request import Request, end
from kohya_ext.dry_run.tracker import BACKWARD, FORWARD, STEP
from kohya_ext.dry_run.zero_run import ZeroRun
from kohya_ext.estimate.seconds import Work

#: The phases before the first batch, and between steps.
LOADING, SAMPLING = "loading", "sampling"

#: Kind of a model's weights -> the phase before the first batch in which the model runs.
_CACHING = {Kind.VAE: "caching latents", Kind.TEXT_ENCODER: "caching text encoder outputs"}

#: Backward passes after which a reserve that still grows is taken as it is: more than any known run grows for.
_MOST_PASSES = 60


@dataclass
class Steps:
    """The steps that a tracker has logged so far."""

    tracker: GpuTracker
    request: Request
    file: Path
    """The result."""
    divided: ZeroRun | None = None
    """DeepSpeed's state; None without it."""
    check: Callable[[], None] = lambda: None
    """Raises UserError if the log is of no use."""
    graphs: list[Any] | None = None
    """The graphs of compiled blocks, if they are the result."""
    passes: list[tuple[int, int]] = field(default_factory=list)
    """Events and FLOPs at the beginning of each backward pass."""
    work: list[Work] = field(default_factory=list)
    """The kernels before each backward pass, since the one before."""
    optimizers: list[Any] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    """The phases that optimizers have interrupted."""
    _hook: Any = None
    """Of all modules, before the first batch."""

    def install(self) -> None:
        """Follow data loaders, backward passes and optimizers for the rest of the process."""
        self._name_start()
        backward, iterate = torch.Tensor.backward, torch.utils.data.DataLoader.__iter__

        def run_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            if not args and kwargs.get("gradient") is None:  # a loss has none, and a pass that is recorded has one
                self._begin_pass()
            self.tracker.mark_saved()
            with self.tracker.during(BACKWARD):
                return backward(loss, *args, **kwargs)

        def begin_batches(loader: Any) -> Any:
            self._hook.remove()
            self.tracker.phase = FORWARD
            self._name_kinds()  # autocast's copies are those of weights
            return iterate(loader)

        torch.Tensor.backward, torch.utils.data.DataLoader.__iter__ = run_backward, begin_batches
        if self.request.sampled:
            self._name_sampling()
        self._follow_optimizers()

    def _name_start(self) -> None:
        """Name the phases before the first batch. A model that runs then does so for a cache; the next move loads a model."""
        self.tracker.phase = LOADING
        apply = torch.nn.Module._apply

        def load(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.tracker.phase in _CACHING.values():
                self.tracker.phase = LOADING
            return apply(module, *args, **kwargs)

        def cache(module: Any, _: Any) -> None:
            phase = _CACHING.get(_kind_of(module))
            if phase is not None and self.tracker.phase in (LOADING, *_CACHING.values()) and self.tracker.phase != phase:
                self.tracker.phase = phase
                self._name_kinds()

        torch.nn.Module._apply = load
        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(cache)

    def _follow_optimizers(self) -> None:
        """Log steps, and the norm of gradients before them, as the optimizer's."""
        create, clip = torch.optim.Optimizer.__init__, torch.nn.utils.clip_grad_norm_

        def create_and_keep(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            create(optimizer, *args, **kwargs)
            self.optimizers.append(optimizer)

        def clip_in_step(*args: Any, **kwargs: Any) -> Any:
            with self.tracker.during(STEP):
                return clip(*args, **kwargs)

        torch.optim.Optimizer.__init__, torch.nn.utils.clip_grad_norm_ = create_and_keep, clip_in_step
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(self._end_step)

    def _name_sampling(self) -> None:
        accumulate = accelerate.Accelerator.accumulate

        def begin_batch(*args: Any, **kwargs: Any) -> Any:
            self.tracker.phase = FORWARD
            return accumulate(*args, **kwargs)

        accelerate.Accelerator.accumulate = begin_batch

    def _begin_pass(self) -> None:
        if self.graphs is not None:
            self._end([asdict(graph) for graph in self.graphs])
        self.passes.append((len(self.tracker.events), self.tracker.flops))
        self.work.append(self.tracker.take_work())
        if len(self.passes) > self.request.passes or self._repeats():
            self.check()
            self._end(self.result())
        self.tracker.phase = FORWARD

    def _end(self, result: Any) -> None:
        self.file.write_text(json.dumps(result), encoding="utf-8")
        end(0)

    def _repeats(self) -> bool:
        """Add the last step of the log from the one before, instead of running it, if this one repeats itself.

        The first step creates the optimizer's state, and the third one records passes.
        """
        if self.request.recorded or len(self.passes) <= self.request.passes - self.request.micro_steps:
            return False
        self._name_kinds()
        return self._repeat()

    def _repeat(self) -> bool:
        """Add the last step of the log once more. Return False if the next one would differ."""
        micro_steps, tracker = self.request.micro_steps, self.tracker
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
        for last, _ in self.passes:  # with those added below: gaps between tensors may grow over more steps than were run
            allocator.replay(self.tracker.events[first:last])
            passes.append({"allocated": max(allocator.peaks.values()), "reserved": allocator.most_reserved})
            first = last
            if len(passes) == len(self.passes) and not self.request.recorded and grows(passes, self.request.micro_steps):
                self._repeat()
        phase, reserved = _highest(allocator), allocator.most_reserved
        allocated = allocator.peaks[phase]
        measured = self.request.micro_steps if self.request.recorded else len(self.work) - 1  # before passes are recorded
        work = self.work[measured]
        if self.request.recorded:  # that step also creates the optimizer's state
            work = replace(work, optimizer=self.work[-1].optimizer)
        tensors = peak(self.tracker.events, self.tracker.kinds, phase)
        trained = {id(each): each.numel() for each in self._trained()}
        return {
            "allocated": allocated,
            "reserved": reserved,
            "minimum_reserved": minimum_reserved(self._replay, max(allocator.peaks.values()), reserved, kind),
            "peak_phase": phase,
            "parts": {kind.value: size for kind, size in tensors.parts.items()} | {"rounding": allocated - tensors.bytes},
            "phase_peaks": allocator.peaks,
            "flops": self.passes[measured][1] - self.passes[measured - self.request.micro_steps][1],
            "work": work.as_row(),
            "recorded_kernels": self.tracker.recorded_kernels,
            "trainable_parameters": sum(trained.values()),
            "trained_tensors": len(trained),
            "host": {} if self.divided is None else self.divided.host,
            "passes": passes,
        }

    def _replay(self, allocator: CachingAllocator) -> None:
        allocator.replay(self.tracker.events)

    def _name_kinds(self) -> None:
        """Give the storages of models and of the optimizers' states their kinds."""
        objects = gc.get_objects()
        modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        self._mark((each for each in objects if isinstance(each, torch.nn.Parameter)), Kind.WEIGHT)
        for kind in _CACHING:
            models = (each for each in modules if _kind_of(each) is kind)
            self._mark((tensor for model in models for tensor in _tensors(model)), kind)
        self._mark(self._trained(), Kind.TRAINED_WEIGHT)
        for optimizer in self.optimizers:
            values = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
            self._mark(values, Kind.OPTIMIZER_STATE)

    def _trained(self) -> Iterator[Any]:
        """Return the weights that are trained. Those of an optimizer that was only tried are all on the host."""
        if self.divided is not None:  # its optimizer has parts of them
            return iter(self.divided.trained)
        of_run = (optimizer for optimizer in self.optimizers if any(map(is_on_gpu, _parameters(optimizer))))
        return (weight for optimizer in of_run for weight in _parameters(optimizer) if weight.requires_grad)

    def _mark(self, tensors: Iterator[Any], kind: Kind) -> None:
        self.tracker.mark((tensor for tensor in tensors if is_on_gpu(tensor)), kind)


def grows(passes: Sequence[Mapping[str, int]], micro_steps: int) -> bool:
    """Return whether one of the last two steps has reserved more than all before it: a later one may then, too."""
    return len(passes) < _MOST_PASSES and passes[-1]["reserved"] > passes[-1 - 2 * micro_steps :][0]["reserved"]


def _highest(allocator: CachingAllocator) -> str:
    """Return the phase in which the reserve reached its peak; of a step, the phase with the most tensors."""
    step = [phase for phase in (FORWARD, BACKWARD, STEP) if phase in allocator.peaks]
    return max(step, key=allocator.peaks.__getitem__) if allocator.fullest in step else allocator.fullest


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _tensors(module: Any) -> Iterator[Any]:
    return itertools.chain(module.parameters(), module.buffers())


def _kind_of(module: Any) -> Kind:
    """Return the kind of a model's weights by the package or the name of its class."""
    kind = type(module)
    if kind.__module__.startswith("transformers."):
        return Kind.TEXT_ENCODER
    names = f"{kind.__module__}.{kind.__name__}".lower()
    is_vae = "vae" in names or "autoencoder" in names or kind.__name__ in ("Encoder", "Decoder")  # FLUX's own classes
    return Kind.VAE if is_vae else Kind.WEIGHT
