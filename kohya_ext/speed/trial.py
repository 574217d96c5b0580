"""Compare ways to run a model's passes on its first real batch, and choose the fastest one that computes the same.

The batch, the model and the trained weights are the run's own. Everything that passes change is put back: gradients, random
states, weights. The optimizer does not step, also not during the backward pass (`released`).

- **The same**: the output and all gradients are compared with those of an eager pass. An exact candidate may differ by as much
  as two eager passes do. Where a close one rounds differently, the difference grows from layer to layer, to a tenth of some
  gradients. So each layer is first compared by itself (`layers`), then all gradients together (`comparison`).
- **Faster**: the median of several passes must be shorter by more than both spreads and by :data:`LEAST_GAIN`. Exact candidates
  come first, and a simpler candidate wins unless another one is faster.
- Weights that are all zero, as a LoRA's are before the first step, would hide half of the gradients. They have small made-up
  values during a trial.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from kohya_ext.compiling.blocks import RUN, Attempt, CompilingError
from kohya_ext.compiling.eager_steps import Meter
from kohya_ext.compiling.graphs import RESERVE, RandomStates, RecordedModel, Recorder, tensor_of, test_gradient
from kohya_ext.patching.swapped_blocks import move_back
from kohya_ext.speed import switches
from kohya_ext.speed.comparison import Results
from kohya_ext.speed.layers import BlockCall, LayerCheck, recorded_calls
from kohya_ext.speed.released import ReleasedGradients
from kohya_ext.speed.switches import Switch
from kohya_ext.speed.timing import TimedPasses

#: How many times as fast as the best one so far a candidate must be.
LEAST_GAIN = 1.03

#: The most seconds of a trial, and its largest share of the run's passes.
MOST_SECONDS, SHARE = 60.0, 0.05

#: Passes of many seconds need more for the first candidate. They get it, up to these limits.
MOST_SECONDS_OF_LONG_PASSES, SHARE_OF_LONG_PASSES = 300.0, 0.01

#: The same for compiling, in addition: it is repeated in later runs, though from code that was kept.
MOST_SECONDS_OF_COMPILING, SHARE_OF_COMPILING = 180.0, 0.01

#: Seconds in which blocks can be compiled at best.
LEAST_SECONDS_OF_COMPILING = 10.0

#: Why a candidate was not tried.
NO_TIME = "not tried, for lack of time"

#: Why a candidate is not tried again.
FATAL = "it has ended earlier runs on this GPU; to try it again: python -m kohya_ext tune --self_test"

#: Why recorded passes were not tried.
NO_GAIN = "the GPU does not wait for Python"

#: Eager passes before the first candidate: one that sets up, and two that are compared and timed.
_PASSES_OF_EAGER = 3

#: Eager passes that these take about as long as: a candidate's own passes, of which two are timed; a recording; the comparison
#: of all layers, and of one layer of each kind.
_PASSES, _OF_RECORDING, _OF_ALL_LAYERS, _OF_KINDS = 3, 4, 10, 1

#: Passes in which eager ones and one candidate are tried, and one of reserve.
_LEAST_PASSES = _PASSES_OF_EAGER + _PASSES + _OF_KINDS + 1

#: The share of a trial's seconds in which all layers are compared, and otherwise one of each kind.
_SHARE_OF_LAYERS = 0.25

#: A compiler fuses operations itself.
_CONTRADICTING = {switches.FUSED_OPERATIONS.name, switches.COMPILED_BLOCKS.name}

#: Size of the values that replace zeros.
_MADE_UP = 0.01


@dataclass(frozen=True)
class Candidate:
    """One way to run the passes, and what the trial has found."""

    features: tuple[str, ...] = ()
    """The names of the switches that are on; none for eager passes."""
    seconds: float | None = None
    """Median of both passes."""
    spread: float = 0.0
    """Of the passes, in seconds."""
    is_limited_by_gpu: bool = False
    """Whether Python launches the passes in less time than the GPU takes for them."""
    peak: int = 0
    """Bytes of temporary tensors at their peak."""
    difference: float | None = None
    """The difference of the output and all gradients from the eager ones, as a share of their norm."""
    setup: float = 0.0
    """Seconds before the first pass: of compiling."""
    rejected: str | None = None
    """Why it is not used; None if it may be."""
    in_time: bool = True
    """Whether there was enough time for it."""

    @property
    def is_compiled(self) -> bool:
        """Whether blocks are compiled."""
        return switches.COMPILED_BLOCKS.name in self.features

    @property
    def close(self) -> tuple[str, ...]:
        """Its features that change results by rounding."""
        return tuple(switch.name for switch in switches.ALL if switch.name in self.features and switch.exactness == "close")

    @property
    def is_exact(self) -> bool:
        """Whether its results are bit-identical to those of eager passes."""
        return not self.close

    @property
    def without_recordings(self) -> tuple[str, ...]:
        """Its other features."""
        return tuple(name for name in self.features if name != switches.CUDA_GRAPHS.name)

    @property
    def is_recorded(self) -> bool:
        """Whether its passes are recorded."""
        return switches.CUDA_GRAPHS.name in self.features

    def beats(self, other: Candidate) -> bool:
        """Return whether it is faster than another one by more than the noise."""
        if self.rejected is not None or self.seconds is None or other.seconds is None:
            return False
        return self.seconds * LEAST_GAIN < other.seconds and other.seconds - self.seconds > self.spread + other.spread


class NoTrialError(Exception):
    """The reason why a trial is not made."""


@dataclass
class Trial:
    """The passes of one model on one batch.

    ``modules``: the model, and the networks that change its layers. ``needed``: bytes that the rest of a step needs next to
    recordings. ``passes_left``: micro-batches that the run has left. ``watch`` runs a replay.
    """

    recorder: Recorder
    modules: Sequence[torch.nn.Module]
    trained: Sequence[torch.Tensor]
    passes_left: int
    needed: int = 0
    meter: Meter | None = None
    watch: Callable[[Callable[[], None]], None] = lambda replay: replay()
    fatal: Collection[tuple[str, ...]] = ()
    """Features of candidates that have ended the processes of earlier trials."""
    noted: Callable[[tuple[str, ...]], AbstractContextManager[None]] = lambda features: nullcontext()
    """Runs while some features are tried, so that a later run knows if they end the process."""
    is_lost: Callable[[], bool] = lambda: False
    """Returns whether the device does nothing more for this process, as after an illegal access."""
    trying: tuple[str, ...] = ()
    """The features that were tried last."""
    clock: Callable[[], float] = time.monotonic
    _forward: Callable[..., Any] = lambda: None
    _args: Sequence[Any] = ()
    _kwargs: Mapping[str, Any] = field(default_factory=dict)
    _precision: tuple[bool, torch.dtype] = (False, torch.float32)
    _calls: Mapping[torch.nn.Module, BlockCall] = field(default_factory=dict)
    _reference: Results = field(default_factory=lambda: Results(()))
    _noise: float = 0.0
    """The difference of two eager passes."""
    _released: ReleasedGradients = field(default_factory=lambda: ReleasedGradients(()))
    _samples: bool = False
    """Whether one layer of each kind is compared instead of all."""
    _problems: dict[tuple[str, ...], str | None] = field(default_factory=lambda: {(): None})
    """Close features -> how layers are wrong with them, or None."""

    @property
    def is_worthwhile(self) -> bool:
        """Whether the run is long enough to try any candidate."""
        return SHARE * self.passes_left >= _PASSES_OF_EAGER + _PASSES + _OF_KINDS

    def run(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], features: Sequence[Switch]
    ) -> list[Candidate]:
        """Return the candidates of all combinations of ``features``, eager passes first. Raises NoTrialError.

        Called in a forward pass of the training loop, in its autocast and with its random states.
        """
        with self._on(forward, args, kwargs) as states:
            switches.use((), features)
            begun = self.clock()
            eager = self._eager(states)
            assert eager.seconds is not None
            limit = self._limit(eager.seconds)
            self._samples = _OF_ALL_LAYERS * eager.seconds > _SHARE_OF_LAYERS * limit
            candidates = _combinations(features)
            cheapest_first = sorted(candidates, key=partial(self._cost, eager.seconds))
            if self.clock() + (_PASSES + _OF_KINDS) * eager.seconds > begun + limit:
                raise NoTrialError(f"forward and backward take {eager.seconds:.1f} s, too long for a trial")
            results = {eager.features: eager}
            for candidate in cheapest_first:
                until = begun + (self.allowed(eager.seconds) if candidate.is_compiled else limit)
                results[candidate.features] = self._outcome(candidate, results, until, states)
            return [results[candidate.features] for candidate in (eager, *candidates)]

    def _outcome(
        self, candidate: Candidate, results: Mapping[tuple[str, ...], Candidate], until: float, states: RandomStates
    ) -> Candidate:
        """Return a candidate with its measurements, or why it was not tried: for lack of time, or as others have shown."""
        seconds = results[()].seconds
        assert seconds is not None
        if (reason := _reason_not_to_try(candidate, results, self.fatal)) is not None:
            return replace(candidate, rejected=reason)
        if candidate.is_compiled and not self._calls:
            return replace(candidate, rejected="the model has no blocks that can be compiled")
        left = until - self.clock()
        if self._cost(seconds, candidate) > left:
            return replace(candidate, rejected=NO_TIME, in_time=False)
        self.trying = candidate.features
        with self.noted(candidate.features):
            if not candidate.is_compiled:
                return self._try(candidate, states, results[()].peak)
            before = RUN.seconds
            with self._compiling(left - _PASSES * seconds) as attempt:
                tried = self._try(candidate, states, results[()].peak)
            rejected = attempt.problem or tried.rejected
            return replace(tried, rejected=rejected, in_time=attempt.is_in_time, setup=RUN.seconds - before)

    def _compiling(self, seconds: float) -> AbstractContextManager[Attempt]:
        """Compile blocks inside the block, for some seconds at most."""
        kinds = len({call.kind for call in self._calls.values()})
        return RUN.attempting(self.recorder.device.type, seconds, kinds, self.clock)

    def _cost(self, seconds: float, candidate: Candidate) -> float:
        """Return about how many seconds it takes to try a candidate, if an eager pass takes ``seconds``."""
        of_layers = 0 if candidate.close in self._problems else _OF_KINDS if self._samples else _OF_ALL_LAYERS
        passes = _PASSES + of_layers + (_OF_RECORDING if candidate.is_recorded else 0)
        return passes * seconds + (LEAST_SECONDS_OF_COMPILING if of_layers and candidate.is_compiled else 0)

    def _limit(self, seconds: float) -> float:
        """Return the seconds of the trial without compiling, if an eager pass takes ``seconds``."""
        run, least = self.passes_left * seconds, _LEAST_PASSES * seconds
        is_allowed = least <= min(MOST_SECONDS_OF_LONG_PASSES, SHARE_OF_LONG_PASSES * run)
        return min(max(MOST_SECONDS, least if is_allowed else 0.0), SHARE * run)

    def allowed(self, seconds: float) -> float:
        """Return the seconds of the trial, if an eager pass takes ``seconds``."""
        return self._limit(seconds) + min(MOST_SECONDS_OF_COMPILING, SHARE_OF_COMPILING * self.passes_left * seconds)

    def check(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], chosen: Sequence[Switch]
    ) -> str | None:
        """Return why some features, which an earlier trial has chosen, are wrong in this run; None if they are right.

        One layer of each kind is compared: the trial has compared all passes with the same code. Blocks are compiled.
        Recordings are checked when the run makes them.
        """
        names = tuple(switch.name for switch in chosen)
        if names in self.fatal:
            return FATAL
        self.trying = names
        with self._on(forward, args, kwargs) as states, self.noted(names):
            self._samples = True
            switches.use((), chosen)
            if switches.COMPILED_BLOCKS in chosen:
                self._record_calls()
            switches.use(names, chosen)
            if switches.COMPILED_BLOCKS not in chosen:
                return self._problem_of_layers(states)
            with self._compiling(math.inf) as attempt, suppress(CompilingError):
                return self._problem_of_layers(states)
            return attempt.problem

    @contextmanager
    def _on(self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[RandomStates]:
        """Run passes on copies of a batch inside the block, and put back what they change."""
        device = self.recorder.device.type
        self._precision = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._forward, self._args = forward, [_copy(value) for value in args]
        self._kwargs = {name: _copy(value) for name, value in kwargs.items()}
        used = [switch.name for switch in switches.ALL if switch.on]
        switches.CUDA_GRAPHS.is_paused = True  # the run's own recordings
        gradients = [weight.grad for weight in self.trained]
        states = RandomStates(self.recorder.generators)
        zeros = self._fill_zeros()
        self._released = ReleasedGradients(self.trained)
        try:
            with self._released.without_steps():
                yield states
        finally:
            switches.use(used)
            switches.CUDA_GRAPHS.is_paused = False
            for weight in zeros:
                weight.data.zero_()
            for weight, gradient in zip(self.trained, gradients, strict=True):
                weight.grad = gradient
            states.restore()
            move_back(self.modules[0])
            self._args, self._kwargs, self._calls, self._released = (), {}, {}, ReleasedGradients(())
            self.recorder.return_unused()

    def _eager(self, states: RandomStates) -> Candidate:
        """Return the eager candidate, with the difference of two passes; keep the results of one as the reference."""
        self._record_calls()  # sets up what later passes reuse, such as tables and workspaces
        timed = self._timed(self._forward, states)
        self._reference = self._results(timed.once())
        if not self._reference.is_finite:
            raise NoTrialError("the eager pass is not finite")
        self._noise = self._results(timed.once()).minus(self._reference).share
        return _measured(Candidate(difference=self._noise), timed)

    def _record_calls(self) -> None:
        """Run eager passes, and keep how they call the model's blocks."""
        with recorded_calls(self.modules[0]) as self._calls:
            self._passes(self._forward)

    def _try(self, candidate: Candidate, states: RandomStates, peak: int) -> Candidate:
        """Return a candidate with its measurements. Any error, such as one of memory, rejects it, unless the device is lost.

        ``peak``: bytes of temporary tensors in eager passes.
        """
        switches.use(candidate.without_recordings)
        lines: list[str] = []
        recorded = None
        try:
            forward = self._forward
            if candidate.is_recorded:
                recorded = RecordedModel(self.recorder, self.modules, self.trained, lines.append, max_sizes=1, watch=self.watch)
                recorded.needed = self.needed
                forward = partial(_replayed, recorded, self._forward)
            if (problem := self._problem_of(candidate.close, states)) is not None:
                return replace(candidate, rejected=problem)
            tried = self._compared(candidate, forward, states)
            problem = self._lack_of_room(tried, peak) if recorded is None else recorded.off
            return replace(tried, rejected=tried.rejected or problem)
        except Exception as error:
            if self.is_lost():
                raise
            return replace(candidate, rejected=" ".join(f"{type(error).__name__}: {error}".split())[:200])
        finally:
            self._clear_gradients()
            if recorded is not None:
                recorded.release()
            move_back(self.modules[0])  # a pass that ended with an error leaves them

    def _lack_of_room(self, candidate: Candidate, peak: int) -> str | None:
        """Return that a candidate needs more memory than eager passes and leaves too little; None if it does not."""
        self._clear_gradients()
        self.recorder.return_unused()
        free = self.recorder.free_bytes()
        if candidate.peak <= peak or candidate.peak + self.needed + RESERVE <= free:
            return None
        return f"the passes need {candidate.peak / 2**20:.0f} of {free / 2**20:.0f} MiB, too much next to the rest of a step"

    def _compared(self, candidate: Candidate, forward: Callable[..., Any], states: RandomStates) -> Candidate:
        """Return a candidate with the difference of its results, and its times if they are right."""
        self._passes(forward)
        timed = self._timed(forward, states)
        results, reference = self._results(timed.once()), self._reference
        candidate = replace(candidate, difference=results.minus(reference).share)
        problem = results.unlike(reference, self._noise) if candidate.is_exact else results.far_from(reference)
        return _measured(candidate, timed) if problem is None else replace(candidate, rejected=problem)

    def _timed(self, forward: Callable[..., Any], states: RandomStates) -> TimedPasses[torch.Tensor]:
        return TimedPasses(states.restore, partial(self._passes, forward), self.recorder, self.meter)

    def _problem_of(self, close: tuple[str, ...], states: RandomStates) -> str | None:
        """Return how the layers are wrong with some features, which are on; None if they are right. Looks once."""
        if close not in self._problems:
            self._problems[close] = self._problem_of_layers(states)
        return self._problems[close]

    def _problem_of_layers(self, states: RandomStates) -> str | None:
        """Compare each layer's passes with and without the features that are on; return how one is wrong, or None."""
        self._clear_gradients()
        self.recorder.return_unused()
        states.restore()
        check = LayerCheck(self.trained, self.recorder, self._calls, self._samples)
        with torch.no_grad(), self._autocast(), check.on(self.modules[0]):
            self._forward(*self._args, **self._kwargs)
        move_back(self.modules[0])
        self.recorder.return_unused()  # tensors of these sizes would leave gaps between those of the passes
        return check.problem

    def _results(self, output: torch.Tensor) -> Results:
        """Return the results of the last passes."""
        samples = self._released.samples
        return Results([output, *(samples.get(tensor, tensor.grad) for tensor in (*self.trained, *self._inputs()))])

    def _passes(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Run both passes, with a test gradient of the output; leave the gradients of trained weights and inputs."""
        self._clear_gradients()
        with torch.enable_grad(), self._autocast():
            output = tensor_of(forward(*self._args, **self._kwargs))
        with self._released.freed(), torch.autocast(self.recorder.device.type, enabled=False, cache_enabled=False):
            output.backward(test_gradient(output))
        return output.detach()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """Run passes in the run's precision inside the block.

        Autocast's cache would keep casts of the weights with the graph of an earlier pass, and clearing it drops those of the
        run's own text encoder. It is on for compiled blocks alone, whose code is only for passes with a cache.
        """
        enabled, dtype = self._precision
        is_cached = switches.COMPILED_BLOCKS.on
        if is_cached:
            torch.clear_autocast_cache()
        with torch.autocast(self.recorder.device.type, dtype, enabled, cache_enabled=is_cached):
            yield
        if is_cached:
            torch.clear_autocast_cache()

    def _inputs(self) -> list[torch.Tensor]:
        """Return the inputs that need a gradient."""
        values = (*self._args, *self._kwargs.values())
        return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]

    def _clear_gradients(self) -> None:
        for tensor in (*self.trained, *self._inputs()):
            tensor.grad = None
        self._released.samples.clear()

    def _fill_zeros(self) -> list[torch.Tensor]:
        """Give small values to trained weights that are all zero; return these weights."""
        norms = torch.stack([norm.float().cpu() for norm in torch._foreach_norm([weight.detach() for weight in self.trained])])
        zeros = [weight for weight, norm in zip(self.trained, norms.tolist(), strict=True) if norm == 0]
        for weight in zeros:
            numbers = torch.arange(weight.numel(), device=weight.device, dtype=torch.float32)
            weight.data.copy_((_MADE_UP * (numbers * 1.7).sin()).view_as(weight))
        return zeros


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest candidate; of those that the noise does not tell apart, the first."""
    best = candidates[0]
    for candidate in candidates[1:]:
        if candidate.beats(best):
            best = candidate
    return best


def _measured(candidate: Candidate, timed: TimedPasses[Any]) -> Candidate:
    """Return a candidate with its times."""
    timed.until_known()
    return replace(
        candidate,
        seconds=median(timed.seconds),
        spread=timed.spread,
        peak=timed.peak,
        is_limited_by_gpu=timed.is_limited_by_device,
    )


def _reason_not_to_try(
    candidate: Candidate, results: Mapping[tuple[str, ...], Candidate], fatal: Collection[tuple[str, ...]]
) -> str | None:
    """Return why a candidate is not tried, from what others and earlier trials have shown; None if it is."""
    if candidate.features in fatal:
        return FATAL
    if candidate.is_recorded and results[candidate.without_recordings].is_limited_by_gpu:
        return NO_GAIN
    parts = (each for each in results.values() if set(each.features) < set(candidate.features))
    if any(part.rejected not in (None, NO_TIME, NO_GAIN) for part in parts):
        return "a part of it was rejected"
    return None


def _combinations(features: Sequence[Switch]) -> list[Candidate]:
    """Return all combinations of features, those that are exact and those with fewer features first."""
    every = [
        tuple(switch.name for number, switch in enumerate(features) if bits >> number & 1)
        for bits in range(1, 2 ** len(features))
    ]
    possible = (candidate for candidate in map(Candidate, every) if not _CONTRADICTING.issubset(candidate.features))
    return sorted(possible, key=lambda candidate: (not candidate.is_exact, len(candidate.features)))


def _replayed(recorded: RecordedModel, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return recorded(forward, args, kwargs)


def _copy(value: Any) -> Any:
    """Return a detached copy of a tensor; any other value itself."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
