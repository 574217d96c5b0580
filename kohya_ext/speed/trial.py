"""Compare ways to run a model's passes on its first real batch, and choose the fastest one that computes the same.

The batch, the model and the trained weights are the run's own. Everything that passes change is put back: gradients, random
states, weights. The optimizer does not step.

- **The same**: the output and all gradients are compared with those of an eager pass. An exact candidate may differ by as much
  as two eager passes do. Where a close one rounds differently, the difference grows from layer to layer, to a tenth of some
  gradients. So each layer is first compared by itself (`layers`), then all gradients together (`comparison`).
- **Faster**: the median of several passes must be shorter by more than both spreads and by :data:`LEAST_GAIN`. Exact candidates
  come first, and a simpler candidate wins unless another one is faster.
- Weights that are all zero, as a LoRA's are before the first step, would hide half of the gradients. They have small made-up
  values during a trial.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import quantiles
from typing import Any

import torch

from kohya_ext.compiling.eager_steps import Meter
from kohya_ext.compiling.graphs import RandomStates, RecordedModel, Recorder, tensor_of, test_gradient
from kohya_ext.speed import switches
from kohya_ext.speed.comparison import Results
from kohya_ext.speed.layers import LayerCheck
from kohya_ext.speed.switches import Switch

#: How many times as fast as the best one so far a candidate must be.
LEAST_GAIN = 1.03

#: Seconds of the passes that are timed, and the fewest and most of them.
_TIMED_SECONDS, _FEWEST, _MOST = 1.5, 3, 9

#: The most seconds of a trial, and its largest share of the run's passes.
MOST_SECONDS, SHARE = 60.0, 0.05

#: Why a candidate was not tried.
NO_TIME = "not tried, for lack of time"

#: Eager passes that trying a candidate takes about as long as: a recording, a comparison, and the timed ones.
PASSES_OF_A_CANDIDATE = 12

#: Eager passes: one that sets up, two that are compared, and with the fewest timed ones.
_PASSES_OF_REFERENCE, _PASSES_OF_EAGER = 3, 6

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
    """Distance of the quartiles, in seconds."""
    peak: int = 0
    """Bytes of temporary tensors at their peak."""
    difference: float | None = None
    """The difference of the output and all gradients from the eager ones, as a share of their norm."""
    rejected: str | None = None
    """Why it is not used; None if it may be."""

    @property
    def is_exact(self) -> bool:
        """Whether its results are bit-identical to those of eager passes."""
        return all(switch.exactness == "exact" for switch in switches.ALL if switch.name in self.features)

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
    clock: Callable[[], float] = time.monotonic
    had_most_time: bool = False
    """Whether the trial had as much time as in the longest run."""
    _forward: Callable[..., Any] = lambda: None
    _args: Sequence[Any] = ()
    _kwargs: Mapping[str, Any] = field(default_factory=dict)
    _precision: tuple[bool, torch.dtype] = (False, torch.float32)

    @property
    def is_worthwhile(self) -> bool:
        """Whether the run is long enough to try any candidate."""
        return SHARE * self.passes_left >= _PASSES_OF_EAGER + PASSES_OF_A_CANDIDATE

    def run(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], features: Sequence[Switch]
    ) -> list[Candidate]:
        """Return the candidates of all combinations of ``features``, eager passes first. Raises NoTrialError.

        Called in a forward pass of the training loop, in its autocast and with its random states.
        """
        with self._on(forward, args, kwargs) as states:
            switches.use((), features)
            begun = self.clock()
            reference, noise = self._reference(states)
            single = (self.clock() - begun) / _PASSES_OF_REFERENCE
            if (_PASSES_OF_EAGER + PASSES_OF_A_CANDIDATE) * single > self._limit(single):
                raise NoTrialError(f"forward and backward take {single:.1f} s, too long for a trial")
            eager = self._timed(Candidate(difference=noise), self._forward, states)
            assert eager.seconds is not None
            limit = self._limit(eager.seconds)
            self.had_most_time = limit >= MOST_SECONDS
            candidates = [eager]
            for chosen in _combinations(features):
                if self.clock() + PASSES_OF_A_CANDIDATE * eager.seconds > begun + limit:
                    candidates.append(Candidate(chosen, rejected=NO_TIME))
                elif any(set(each.features) < set(chosen) and each.rejected for each in candidates):
                    candidates.append(Candidate(chosen, rejected="a part of it was rejected"))
                else:
                    candidates.append(self._try(Candidate(chosen), states, reference, noise))
            return candidates

    def _limit(self, seconds: float) -> float:
        """Return the seconds of the trial, if an eager pass takes ``seconds``."""
        return min(MOST_SECONDS, SHARE * self.passes_left * seconds)

    def check(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], chosen: Sequence[Switch]
    ) -> str | None:
        """Return why some features, which an earlier trial has chosen, are wrong in this run; None if they are right.

        Recordings are not made: they are checked when the run makes them.
        """
        with self._on(forward, args, kwargs) as states:
            switches.use((), chosen)
            reference, _ = self._reference(states)
            switches.use(_eager(switch.name for switch in chosen), chosen)
            return self._problem_of_layers(states) or self._results(self._forward, states).far_from(reference)

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
        try:
            yield states
        finally:
            switches.use(used)
            switches.CUDA_GRAPHS.is_paused = False
            for weight in zeros:
                weight.data.zero_()
            for weight, gradient in zip(self.trained, gradients, strict=True):
                weight.grad = gradient
            states.restore()
            self._args, self._kwargs = (), {}
            self.recorder.return_unused()

    def _reference(self, states: RandomStates) -> tuple[Results, float]:
        """Return an eager pass's results, and by how much another one differs from them."""
        self._passes(self._forward)  # sets up what later passes reuse, such as tables and workspaces
        reference = self._results(self._forward, states)
        if not reference.is_finite:
            raise NoTrialError("the eager pass is not finite")
        return reference, self._results(self._forward, states).minus(reference).share

    def _try(self, candidate: Candidate, states: RandomStates, reference: Results, noise: float) -> Candidate:
        """Return a candidate with its measurements. Any error, such as one of memory, rejects it."""
        switches.use(_eager(candidate.features))
        lines: list[str] = []
        recorded = None
        try:
            forward = self._forward
            if switches.CUDA_GRAPHS.name in candidate.features:
                recorded = RecordedModel(self.recorder, self.modules, self.trained, lines.append, max_sizes=1, watch=self.watch)
                recorded.needed = self.needed
                forward = partial(_replayed, recorded, self._forward)
            problem = None if candidate.is_exact else self._problem_of_layers(states)
            if problem is None:
                self._passes(forward)
                results = self._results(forward, states)
                problem = results.unlike(reference, noise) if candidate.is_exact else results.far_from(reference)
                candidate = replace(candidate, difference=results.minus(reference).share)
            if problem is None:
                candidate = self._timed(candidate, forward, states)
            if recorded is not None and recorded.off is not None:
                problem = recorded.off
            return replace(candidate, rejected=problem)
        except Exception as error:
            return replace(candidate, rejected=" ".join(f"{type(error).__name__}: {error}".split())[:200])
        finally:
            self._clear_gradients()
            if recorded is not None:
                recorded.release()

    def _problem_of_layers(self, states: RandomStates) -> str | None:
        """Compare each layer's passes with and without the features that are on; return how one is wrong, or None."""
        self._clear_gradients()
        states.restore()
        enabled, dtype = self._precision
        check = LayerCheck(self.trained, self.recorder)
        autocast = torch.autocast(self.recorder.device.type, dtype, enabled, cache_enabled=False)
        with torch.no_grad(), autocast, check.on(self.modules[0]):
            self._forward(*self._args, **self._kwargs)
        return check.problem

    def _timed(self, candidate: Candidate, forward: Callable[..., Any], states: RandomStates) -> Candidate:
        seconds: list[float] = []
        if self.meter is not None:
            self.meter.begin()
        while len(seconds) < _FEWEST or (sum(seconds) < _TIMED_SECONDS and len(seconds) < _MOST):
            states.restore()
            start = self.recorder.mark()
            self._passes(forward)
            seconds.append(max(self.recorder.seconds(start, self.recorder.mark())))
        lower, middle, upper = quantiles(seconds, n=4, method="inclusive")
        peak = self.meter.end() if self.meter is not None else 0
        return replace(candidate, seconds=middle, spread=upper - lower, peak=peak)

    def _results(self, forward: Callable[..., Any], states: RandomStates) -> Results:
        states.restore()
        output = self._passes(forward)
        return Results([output, *(tensor.grad for tensor in (*self.trained, *self._inputs()))])

    def _passes(self, forward: Callable[..., Any]) -> torch.Tensor:
        """Run both passes, with a test gradient of the output; leave the gradients of trained weights and inputs."""
        self._clear_gradients()
        device = self.recorder.device.type
        enabled, dtype = self._precision
        # Autocast's cache would keep casts of the weights with the graph of one pass for the next.
        with torch.enable_grad(), torch.autocast(device, dtype, enabled, cache_enabled=False):
            output = tensor_of(forward(*self._args, **self._kwargs))
        with torch.autocast(device, enabled=False, cache_enabled=False):
            output.backward(test_gradient(output))
        return output.detach()

    def _inputs(self) -> list[torch.Tensor]:
        """Return the inputs that need a gradient."""
        values = (*self._args, *self._kwargs.values())
        return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]

    def _clear_gradients(self) -> None:
        for tensor in (*self.trained, *self._inputs()):
            tensor.grad = None

    def _fill_zeros(self) -> list[torch.Tensor]:
        """Give small values to trained weights that are all zero; return these weights."""
        norms = torch.stack([norm.float() for norm in torch._foreach_norm([weight.detach() for weight in self.trained])])
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


def _combinations(features: Sequence[Switch]) -> list[tuple[str, ...]]:
    """Return all combinations of features, those that are exact and those with fewer features first."""
    every = [
        tuple(switch.name for number, switch in enumerate(features) if bits >> number & 1)
        for bits in range(1, 2 ** len(features))
    ]
    return sorted(every, key=lambda names: (not Candidate(names).is_exact, len(names)))


def _replayed(recorded: RecordedModel, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return recorded(forward, args, kwargs)


def _eager(features: Iterable[str]) -> list[str]:
    """Return the features that a trial switches itself: all but the recordings, which it makes."""
    return [name for name in features if name != switches.CUDA_GRAPHS.name]


def _copy(value: Any) -> Any:
    """Return a detached copy of a tensor; any other value itself."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
