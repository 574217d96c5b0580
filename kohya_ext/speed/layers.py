"""Compare each layer's passes with and without some features, on the layer's own input in the model.

The reference is the same layer in fp32. Eager passes in 16 bits differ from it by rounding, and those with the features may
differ by about as much: :data:`_SHARE` and :data:`_SCALE`. So a wrong factor of one percent in one layer is noticed, although
rounding changes the gradients of a whole model by more.

Some gradients are small differences of large terms, such as those of cross-attention's keys if a caption's tokens are alike.
Eager ones are then mostly rounding, and by chance one of two differs several times as much from the reference. If an eager
gradient changes by more than :data:`_NOISY` where the layer's inputs are rounded differently, it may differ by a multiple.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from kohya_ext.compiling.blocks import RUN
from kohya_ext.compiling.graphs import RandomStates, Recorder, test_gradient
from kohya_ext.kernels import casts
from kohya_ext.kernels.modulation import PendingNorm, modulation_of
from kohya_ext.speed import switches
from kohya_ext.speed.comparison import OF_MODEL, Difference, Results

#: The largest difference from fp32, as a multiple of that of eager passes.
_SHARE = 2.0

#: The largest error of the scale: as a multiple of the eager passes' own, and as a share of their difference, which has no
#: direction but is a sum of few terms in some gradients.
_SCALE, _UNDIRECTED = 2.0, 1.0

#: Added to all: rounding in fp32.
_ROUNDING = 1e-4

#: A gradient that rounding changes by a larger share, and the multiple of that change by which it may differ.
_NOISY, _OF_NOISE = 0.03, 10.0

#: How often an input is rounded differently.
_ROUNDINGS = 3

#: The types of values that code may depend on.
_PLAIN = (bool, int, float, type(None))

#: The largest difference from eager passes in 16 bits, if a layer cannot run in fp32.
_OF_LAYER = Difference(0.02, 0.01)


@dataclass(frozen=True)
class BlockCall:
    """How a model calls one of its blocks."""

    kind: tuple[object, ...]
    """Equal for blocks that share compiled code."""
    needs_gradients: tuple[bool, ...]
    """Of each argument, in order."""


@contextmanager
def recorded_calls(model: torch.nn.Module) -> Iterator[dict[torch.nn.Module, BlockCall]]:
    """Record the calls of a model's blocks with gradients, inside the block."""
    calls: dict[torch.nn.Module, BlockCall] = {}

    def record(block: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            needs = tuple(bool(getattr(value, "requires_grad", False)) for value in (*args, *kwargs.values()))
            calls[block] = BlockCall(_kind(block, args, kwargs), needs)

    with ExitStack() as hooks:
        for module in model.modules():
            if RUN.has(module):
                hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
        yield calls


class LayerCheck:
    """Compares the layers of a model that runs in the block of :meth:`on`; if its blocks are compiled, the blocks.

    ``trained``: the weights whose gradients are compared; they must have none. ``calls``: the model's calls of its blocks.
    ``samples``: whether one layer of each kind is compared instead of all.
    """

    def __init__(
        self,
        trained: Sequence[torch.Tensor],
        recorder: Recorder,
        calls: Mapping[torch.nn.Module, BlockCall] = MappingProxyType({}),
        samples: bool = False,
    ) -> None:
        self.problem: str | None = None
        """How the first wrong layer is wrong; None if all are right."""
        self._trained, self._recorder, self._calls, self._samples = trained, recorder, calls, samples
        self._kinds: set[tuple[object, ...]] = set()
        """The kinds of the layers that were compared."""
        self._features: list[str] = []

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Compare the features that are on. The model must run without gradients, and with the block's autocast."""
        self._features = [switch.name for switch in switches.ALL if switch.on]
        are_compared = self._calls.__contains__ if switches.COMPILED_BLOCKS.on else _is_layer
        with ExitStack() as hooks, casts.apart():
            for name, layer in model.named_modules():
                if are_compared(layer):
                    hooks.callback(layer.register_forward_hook(partial(self._compare, name), with_kwargs=True).remove)
            yield

    def _compare(self, name: str, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.problem is not None or not (isinstance(output, PendingNorm) or _outputs(output)):
            return
        call = self._calls[layer] if switches.COMPILED_BLOCKS.on else None
        is_new = self._is_new(_kind(layer, args, kwargs) if call is None else call.kind)
        if self._samples and not is_new:
            return
        needs = (True,) * len(args) if call is None else call.needs_gradients
        switches.use(())
        eager = self._results(layer, args, kwargs, needs)
        exact = self._in_fp32(layer, args, kwargs, needs)
        switches.use(self._features)
        ours = self._results(layer, args, kwargs, needs)
        if is_new and RUN.attempt is not None:
            RUN.attempt.compiled_kind()
        allowed = _OF_LAYER if call is None else OF_MODEL
        # A norm's output in 16 bits, which autocast leaves in fp32 for a consumer that rounds it.
        rounding = _ROUNDING + (ours[0].rounding if ours[0] and eager[0] and ours[0].rounding > eager[0].rounding else 0.0)
        noise: list[float] = []
        for place, (each, theirs, reference) in enumerate(zip(ours, eager, exact or [None] * len(eager), strict=True)):
            problem = None if theirs is None or not theirs.is_finite else _problem(each, theirs, reference, rounding, allowed)
            if problem is not None and each is not None and exact is not None and reference is not None:
                noise = noise or self._noise(layer, args, kwargs, needs, exact)
                if noise[place] > _NOISY:
                    problem = each.far_from(reference, Difference(_OF_NOISE * noise[place], math.inf))
            if problem is not None:
                self.problem = f"in {name}, {problem}"
                return

    def _noise(self, layer: Any, args: Any, kwargs: Any, needs: Sequence[bool], exact: Sequence[Results | None]) -> list[float]:
        """Return the largest share by which each eager result differs from the exact one for inputs rounded otherwise."""
        switches.use(())
        shares = [0.0] * len(exact)
        for number in range(1, _ROUNDINGS + 1):
            results = self._results(layer, args, kwargs, needs, rounded=partial(_rounded_differently, number=number))
            for place, (result, reference) in enumerate(zip(results, exact, strict=True)):
                if result is not None and reference is not None:
                    shares[place] = max(shares[place], result.minus(reference).share)
        switches.use(self._features)
        return shares

    def _is_new(self, kind: tuple[object, ...]) -> bool:
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new

    def _results(
        self, layer: Any, args: Any, kwargs: Any, needs: Sequence[bool], rounded: Callable[[Any], Any] = lambda value: value
    ) -> list[Results | None]:
        """Return the outputs, and the gradients of inputs and trained weights.

        ``rounded`` replaces the inputs and the gradients of the outputs.
        """
        forward = vars(layer).get("forward", type(layer).forward.__get__(layer))  # without the hooks of a call
        flags = iter(needs)
        inputs = [_leaf(rounded(value), next(flags, False)) for value in args]
        named = {name: _leaf(rounded(value), next(flags, False)) for name, value in kwargs.items()}
        states = RandomStates(self._recorder.generators)
        is_cached = torch.is_autocast_cache_enabled()
        if is_cached:
            torch.clear_autocast_cache()  # casts of the weights have the graph of an earlier pass
        # Checkpointing has hooks that keep what a layer saves.
        modulation: list[Any] = []
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            output = forward(*inputs, **named)
            if getattr(layer, "is_modulated", False):  # a fused one computes nothing before it is
                scale, shift = modulation = modulation_of(inputs[0])
                output = output * scale + shift
            outputs = _outputs(output)
        if is_cached:
            torch.clear_autocast_cache()
        computed = [output for output in outputs if output.requires_grad]
        if computed:
            with torch.autocast(self._recorder.device.type, enabled=False, cache_enabled=False):
                torch.autograd.backward(computed, [rounded(test_gradient(output)) for output in computed])
        states.restore()
        given = (*inputs, *named.values(), *modulation, *self._trained)
        gradients = [tensor.grad for tensor in given if isinstance(tensor, torch.Tensor)]
        for weight in self._trained:
            weight.grad = None
        return [None if tensor is None else Results([tensor]) for tensor in (*outputs, *gradients)]

    def _in_fp32(self, layer: Any, args: Any, kwargs: Any, needs: Sequence[bool]) -> list[Results | None] | None:
        """Return the same in fp32, with the weights rounded as they are; None if the layer cannot run so.

        A block's tensors are large, and those in fp32 fit into no memory that others leave. So the driver gets it back.
        """
        if layer in self._calls:
            self._recorder.return_unused()
        own = {weight: weight.data for weight in layer.parameters() if weight.is_floating_point()}
        try:
            for weight, data in own.items():
                weight.data = data.float()
            with suppress(Exception), torch.autocast(self._recorder.device.type, enabled=False, cache_enabled=False):
                values = {name: _float(value) for name, value in kwargs.items()}
                return self._results(layer, [_float(value) for value in args], values, needs)
        finally:
            for weight, data in own.items():
                weight.data = data
            if layer in self._calls:
                self._recorder.return_unused()
        for weight in self._trained:
            weight.grad = None
        return None


def _problem(ours: Results | None, eager: Results, exact: Results | None, rounding: float, without: Difference) -> str | None:
    """Return how results are wrong.

    ``rounding``: a difference that is allowed in addition. ``without``: the largest one from eager results, without exact ones.
    """
    if ours is None:
        return "a gradient is missing"
    if exact is None:
        return ours.far_from(eager, without)
    of_eager = eager.minus(exact)
    scale = _SCALE * abs(of_eager.scale) + _UNDIRECTED * of_eager.share + rounding
    return ours.far_from(exact, Difference(_SHARE * of_eager.share + rounding, scale))


def _is_layer(module: torch.nn.Module) -> bool:
    """Return whether a module is one operation: without children, or with a replaced forward and children without any."""
    children = [*module.children()]
    is_replaced = hasattr(type(module).forward, "__wrapped__") and not any([*child.children()] for child in children)
    return not children or is_replaced


def _kind(layer: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a call's code depends on: types, shapes and numbers, also those of the networks that change its layers."""
    parts = [*layer.modules()]
    owners = (getattr(vars(part).get("forward"), "__self__", None) for part in parts)
    networks = (module for owner in owners if isinstance(owner, torch.nn.Module) for module in owner.modules())
    return (*map(_form, [*parts, *networks]), *map(_form_of_value, (*args, *kwargs.values())))


def _form(module: torch.nn.Module) -> tuple[object, ...]:
    forms = {name: _form_of_value(value) for name, value in vars(module).items() if isinstance(value, (*_PLAIN, FunctionType))}
    weights = [*module._parameters.values(), *module._buffers.values()]
    return (type(module), *sorted(forms.items(), key=itemgetter(0)), *map(_form_of_value, weights))


def _form_of_value(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.stride(), value.requires_grad)
    return value if isinstance(value, (*_PLAIN, FunctionType)) else type(value)


def _outputs(output: Any) -> list[torch.Tensor]:
    """Return the tensors with fractions of a layer's output."""
    values = output if isinstance(output, (tuple, list)) else [output]
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _leaf(value: Any, needs_gradient: bool) -> Any:
    """Return a copy of an input, with a gradient of its own."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_(needs_gradient)
    return value


def _rounded_differently(value: Any, number: int) -> Any:
    """Return a tensor with about half of its elements changed by their last bit of 16; any other value itself."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    signs = (torch.arange(value.numel(), device=value.device) * (number + 0.7)).cos().sign().reshape(value.shape)
    return (value * (1 + signs * _unit(value.dtype))).to(value.dtype)


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a type, of bfloat16 for larger ones."""
    return float(torch.finfo(dtype if dtype.itemsize == 2 else torch.bfloat16).eps) / 2


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
