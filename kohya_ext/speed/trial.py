"""Compare ways to run a model's passes on its first real batch, and choose the fastest one that computes the same.

The batch, the model and the trained weights are the run's own. Everything that passes change is put back: gradients, random
states, weights. The optimizer does not step.

- **The same**: the output and all gradients are compared with those of an eager pass. An exact candidate may differ by as much
  as two eager passes do. Where a close one rounds differently, the difference grows from layer to layer, to a tenth of some
  gradients. So each layer is compared by itself first, on its own input, within :data:`OF_LAYER`. Rounding has no direction, so
  a wrong factor of one percent in one layer stands out. Then all gradients together are compared, within :data:`OF_MODEL`.
- **Faster**: the median of several passes must be shorter by more than both spreads and by :data:`LEAST_GAIN`. Exact candidates
  come first, and one that is no faster than a simpler one is not chosen.
- Weights that are all zero, as a LoRA's are before the first step, would hide half of the gradients. They have small made-up
  values during a trial.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import quantiles
from typing import Any, NamedTuple

import torch

from kohya_ext.compiling.eager_steps import Meter
from kohya_ext.compiling.graphs import RandomStates, RecordedModel, Recorder, tensor_of, test_gradient
from kohya_ext.speed import switches
from kohya_ext.speed.switches import Switch


class Tolerance(NamedTuple):
    """The largest difference of a close candidate."""

    share: float
    """Norm of the difference, as a share of the norm."""
    scale: float
    """Relative error of the scale: of the part that has the right direction."""


#: Of the output or a gradient of one layer, and of all gradients of the model together.
OF_LAYER, OF_MODEL = Tolerance(0.02, 0.005), Tolerance(0.1, 0.01)

#: Difference that rounding of the comparison itself may cause.
_ROUNDING = 1e-6

#: How many times as fast as the best one so far a candidate must be.
LEAST_GAIN = 1.03

#: Seconds of the passes that are timed, and the fewest and most of them.
_TIMED_SECONDS, _FEWEST, _MOST = 1.5, 3, 9

#: The most seconds of a trial, and its largest share of the run's passes.
MOST_SECONDS, SHARE = 60.0, 0.05

#: Why a candidate was not tried.
NO_TIME = "not tried, because the run is too short to be worth the time"

#: Eager passes that trying a candidate takes about as long as: a recording, a comparison, and the timed ones.
PASSES_OF_A_CANDIDATE = 12

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


class UnstableError(Exception):
    """A reason why eager passes themselves cannot be compared."""


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
    _forward: Callable[..., Any] = lambda: None
    _args: Sequence[Any] = ()
    _kwargs: Mapping[str, Any] = field(default_factory=dict)
    _precision: tuple[bool, torch.dtype] = (False, torch.float32)

    def run(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], features: Sequence[Switch]
    ) -> list[Candidate]:
        """Return the candidates of all combinations of ``features``, eager passes first. Raises UnstableError.

        Called in a forward pass of the training loop, in its autocast and with its random states.
        """
        with self._on(forward, args, kwargs) as states:
            switches.use((), features)
            begun = time.monotonic()
            reference, noise = self._reference(states)
            eager = self._timed(Candidate(difference=noise), self._forward, states)
            assert eager.seconds is not None
            until = begun + min(MOST_SECONDS, SHARE * self.passes_left * eager.seconds)
            candidates = [eager]
            for chosen in _combinations(features):
                if time.monotonic() + PASSES_OF_A_CANDIDATE * eager.seconds > until:
                    candidates.append(Candidate(chosen, rejected=NO_TIME))
                elif any(set(each.features) < set(chosen) and each.rejected for each in candidates):
                    candidates.append(Candidate(chosen, rejected="a part of it was rejected"))
                else:
                    candidates.append(self._try(Candidate(chosen), states, reference, noise))
            return candidates

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
        switches.CUDA_GRAPHS.on = False  # the run's own recordings
        gradients = [weight.grad for weight in self.trained]
        states = RandomStates(self.recorder.generators)
        zeros = self._fill_zeros()
        try:
            yield states
        finally:
            switches.use(used)
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
            raise UnstableError("the eager pass is not finite")
        return reference, self._results(self._forward, states).difference(reference)

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
                candidate = replace(candidate, difference=results.difference(reference))
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
        features = [switch.name for switch in switches.ALL if switch.on]
        problems: list[str] = []
        self._clear_gradients()
        states.restore()
        with ExitStack() as hooks, torch.no_grad():
            for name, layer in self.modules[0].named_modules():
                if _is_layer(layer):
                    compare = partial(self._compare_layer, name, features, problems)
                    hooks.callback(layer.register_forward_hook(compare, with_kwargs=True).remove)
            device = self.recorder.device.type
            enabled, dtype = self._precision
            with torch.autocast(device, dtype, enabled, cache_enabled=False):
                self._forward(*self._args, **self._kwargs)
        return problems[0] if problems else None

    def _compare_layer(
        self, name: str, features: Sequence[str], problems: list[str], layer: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        if problems or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        results = []
        forward = vars(layer).get("forward", type(layer).forward.__get__(layer))  # its hooks would call this
        for chosen in ((), features):
            switches.use(chosen)
            inputs = [_leaf(value) for value in args]
            states = RandomStates(self.recorder.generators)
            # Not those of checkpointing, which would keep what the layer saves.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                result = forward(*inputs, **kwargs)
            if result.requires_grad:
                with torch.autocast(self.recorder.device.type, enabled=False, cache_enabled=False):
                    result.backward(test_gradient(result))
            states.restore()
            gradients = [each.grad for each in inputs if isinstance(each, torch.Tensor)]
            others = [weight.grad for weight in self.trained if weight.grad is not None]
            results.append([result.detach(), *gradients, *others])
            self._clear_gradients()
        for ours, theirs in zip(*reversed(results), strict=True):
            problem = None if ours is theirs is None else Results([ours]).far_from(Results([theirs]), OF_LAYER)
            if problem is not None and Results([theirs]).is_finite:
                problems.append(f"in {name}, {problem}")
                return

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


class Results:
    """The output of a pass and the gradients of the trained weights, on the CPU."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = [None if tensor is None else tensor.detach().float().cpu() for tensor in tensors]

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors if tensor is not None)

    def difference(self, reference: Results) -> float:
        """Return the norm of the difference of all tensors, as a share of the reference's; infinite if one has no gradient."""
        return self._compared(reference).share

    def unlike(self, reference: Results, noise: float) -> str | None:
        """Return how exact results are wrong, if two eager passes differ by ``noise``; None if they are right."""
        difference = self.difference(reference)
        if difference <= 2 * noise + _ROUNDING:
            return None
        return f"the gradients differ by {difference:.2g} of their norm, and those of two eager passes by {noise:.2g}"

    def far_from(self, reference: Results, tolerance: Tolerance = OF_MODEL) -> str | None:
        """Return how close results are wrong; None if they are right."""
        compared = self._compared(reference)
        if not compared.share <= tolerance.share:
            return f"the gradients differ by {compared.share:.2g} of their norm, more than {tolerance.share:g}"
        if not abs(compared.scale) <= tolerance.scale:
            return f"the gradients' scale differs by {compared.scale:.2g}, more than {tolerance.scale:g}"
        return None

    def _compared(self, reference: Results) -> Tolerance:
        """Return the differences of all tensors together."""
        squares = products = norms = 0.0
        for ours, theirs in zip(self.tensors, reference.tensors, strict=True):
            if (ours is None) != (theirs is None):
                return Tolerance(math.inf, math.inf)
            if ours is not None and theirs is not None:
                squares += float((ours - theirs).square().sum())
                products += float((ours * theirs).sum())
                norms += float(theirs.square().sum())
        if norms == 0:
            return Tolerance(0.0, 0.0) if squares == 0 else Tolerance(math.inf, math.inf)
        return Tolerance(math.sqrt(squares / norms) if squares >= 0 else math.nan, products / norms - 1)


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


def _leaf(value: Any) -> Any:
    """Return an input of a layer that gets a gradient of its own."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _is_layer(module: torch.nn.Module) -> bool:
    """Return whether a module is one operation: without children, or with a replaced forward and children without any."""
    children = [*module.children()]
    is_replaced = hasattr(type(module).forward, "__wrapped__") and not any([*child.children()] for child in children)
    return not children or is_replaced
