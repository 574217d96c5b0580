"""Compare each layer's passes with and without some features, on the layer's own input in the model.

The reference is the same layer in fp32. Eager passes in 16 bits differ from it by rounding, and those with the features may
differ by about as much: :data:`_SHARE` and :data:`_SCALE`. So a wrong factor of one percent in one layer is noticed, although
rounding changes the gradients of a whole model by more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch

from kohya_ext.compiling.graphs import RandomStates, Recorder, test_gradient
from kohya_ext.speed import switches
from kohya_ext.speed.comparison import Difference, Results

#: The largest difference from fp32, as a multiple of that of eager passes.
_SHARE = 2.0

#: The largest error of the scale: as a multiple of the eager passes' own, and as a share of their difference, which has no
#: direction but is a sum of few terms in some gradients.
_SCALE, _UNDIRECTED = 2.0, 1.0

#: Added to all: rounding in fp32.
_ROUNDING = 1e-4

#: The types of values that code may depend on.
_PLAIN = (bool, int, float, type(None))

#: The largest difference from eager passes in 16 bits, if a layer cannot run in fp32.
_WITHOUT_REFERENCE = Difference(0.02, 0.01)


class LayerCheck:
    """Compares the layers of a model that runs in the block of :meth:`on`.

    ``trained``: the weights whose gradients are compared; they must have none. ``samples``: whether one layer of each kind is
    compared instead of all.
    """

    def __init__(self, trained: Sequence[torch.Tensor], recorder: Recorder, samples: bool = False) -> None:
        self.problem: str | None = None
        """How the first wrong layer is wrong; None if all are right."""
        self._trained, self._recorder, self._samples = trained, recorder, samples
        self._kinds: set[tuple[object, ...]] = set()
        """The kinds of the layers that were compared."""
        self._features: list[str] = []

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Compare the features that are on. The model must run without gradients, and with the block's autocast."""
        self._features = [switch.name for switch in switches.ALL if switch.on]
        with ExitStack() as hooks:
            for name, layer in model.named_modules():
                if _is_layer(layer):
                    hooks.callback(layer.register_forward_hook(partial(self._compare, name), with_kwargs=True).remove)
            yield

    def _compare(self, name: str, layer: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.problem is not None or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        if self._samples and not self._is_new(_kind(layer, args, kwargs)):
            return
        switches.use(())
        eager = self._results(layer, args, kwargs)
        exact = self._in_fp32(layer, args, kwargs)
        switches.use(self._features)
        for ours, theirs, reference in zip(
            self._results(layer, args, kwargs), eager, exact or [None] * len(eager), strict=True
        ):
            problem = None if theirs is None or not theirs.is_finite else _problem(ours, theirs, reference)
            if problem is not None:
                self.problem = f"in {name}, {problem}"
                return

    def _is_new(self, kind: tuple[object, ...]) -> bool:
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new

    def _results(self, layer: Any, args: Any, kwargs: Any) -> list[Results | None]:
        """Return the output, and the gradients of inputs and trained weights."""
        forward = vars(layer).get("forward", type(layer).forward.__get__(layer))  # without the hooks of a call
        inputs = [_leaf(value) for value in args]
        states = RandomStates(self._recorder.generators)
        # Checkpointing has hooks that keep what a layer saves.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            output = forward(*inputs, **kwargs)
        if output.requires_grad:
            with torch.autocast(self._recorder.device.type, enabled=False, cache_enabled=False):
                output.backward(test_gradient(output))
        states.restore()
        gradients = [tensor.grad for tensor in (*inputs, *self._trained) if isinstance(tensor, torch.Tensor)]
        for weight in self._trained:
            weight.grad = None
        return [None if tensor is None else Results([tensor]) for tensor in (output, *gradients)]

    def _in_fp32(self, layer: Any, args: Any, kwargs: Any) -> list[Results | None] | None:
        """Return the same in fp32, with the weights rounded as they are; None if the layer cannot run so."""
        own = {weight: weight.data for weight in layer.parameters() if weight.is_floating_point()}
        try:
            for weight, data in own.items():
                weight.data = data.float()
            with suppress(Exception), torch.autocast(self._recorder.device.type, enabled=False, cache_enabled=False):
                values = {name: _float(value) for name, value in kwargs.items()}
                return self._results(layer, [_float(value) for value in args], values)
        finally:
            for weight, data in own.items():
                weight.data = data
        for weight in self._trained:
            weight.grad = None
        return None


def _problem(ours: Results | None, eager: Results, exact: Results | None) -> str | None:
    if ours is None:
        return "a gradient is missing"
    if exact is None:
        return ours.far_from(eager, _WITHOUT_REFERENCE)
    of_eager = eager.minus(exact)
    scale = _SCALE * abs(of_eager.scale) + _UNDIRECTED * of_eager.share + _ROUNDING
    return ours.far_from(exact, Difference(_SHARE * of_eager.share + _ROUNDING, scale))


def _is_layer(module: torch.nn.Module) -> bool:
    """Return whether a module is one operation: without children, or with a replaced forward and children without any."""
    children = [*module.children()]
    is_replaced = hasattr(type(module).forward, "__wrapped__") and not any([*child.children()] for child in children)
    return not children or is_replaced


def _kind(layer: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what a call's code depends on: types, shapes and numbers, also those of the network that changes the layer."""
    owner = getattr(vars(layer).get("forward"), "__self__", None)
    modules = [*layer.modules(), *(owner.modules() if isinstance(owner, torch.nn.Module) and owner is not layer else ())]
    return (*map(_form, modules), *map(_form_of_value, (*args, *kwargs.values())))


def _form(module: torch.nn.Module) -> tuple[object, ...]:
    forms = {name: _form_of_value(value) for name, value in vars(module).items() if isinstance(value, (*_PLAIN, FunctionType))}
    weights = [*module._parameters.values(), *module._buffers.values()]
    return (type(module), *sorted(forms.items(), key=itemgetter(0)), *map(_form_of_value, weights))


def _form_of_value(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.dtype, value.stride(), value.requires_grad)
    return value if isinstance(value, (*_PLAIN, FunctionType)) else type(value)


def _leaf(value: Any) -> Any:
    """Return an input of a layer that gets a gradient of its own."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
