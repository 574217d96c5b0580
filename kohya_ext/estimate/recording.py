"""The passes that `--cuda_graphs` records, as part of a step's log (see kohya_ext.compiling.graphs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kohya_ext.compiling.graphs import tensor_of, with_tensor
from kohya_ext.estimate.events import Kind
from kohya_ext.estimate.tracker import BACKWARD, Tracker

#: The stream that recordings run on.
_STREAM = 1


@dataclass(frozen=True)
class Recording:
    """Where the recorded passes are in a log. Their tensors are in the recordings' pool."""

    inputs: int
    """Number of the first event of the static inputs."""
    start: int
    """Number of the first event of the passes."""
    end: int
    """Number of the first event after them: of the staging buffers for gradients."""
    staged: int
    """Number of the first event after the staging buffers."""
    kernels: int
    """Kernels of both passes."""


@dataclass
class RecordedPasses:
    """Runs a model's passes as a recorded model does, and keeps their place in the log.

    Both run in the forward pass. The model's node in the autograd graph then delivers the gradients.
    """

    tracker: Tracker
    trained: Sequence[Any] = ()
    recording: Recording | None = None
    """The last one; None before the first forward pass."""

    def forward(self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output, and deliver its gradients in backward, as a recorded model does."""
        values = [*args, *kwargs.values()]
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        tensors = [values[place] for place in places]
        first = len(self.tracker.events)
        inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        for place, tensor in zip(places, inputs, strict=True):
            values[place] = tensor
        before = [weight.grad for weight in self.trained]
        for weight in self.trained:
            weight.grad = None
        start, kernels = len(self.tracker.events), self.tracker.kernels
        output, result = self._run(
            lambda: original(model, *values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        )
        trained = [weight for weight in self.trained if weight.grad is not None]
        for weight in trained:
            weight.grad = None
        end, kernels = len(self.tracker.events), self.tracker.kernels - kernels
        buffers = [torch.empty_like(weight) for weight in trained]
        self.tracker.mark(buffers, Kind.GRADIENT)
        node = _Node(result, inputs, trained, buffers, torch.empty_like(result))
        self.recording = Recording(first, start, end, len(self.tracker.events), kernels)
        for weight, gradient in zip(self.trained, before, strict=True):
            weight.grad = gradient
        hook = torch.zeros((), requires_grad=True)
        return with_tensor(output, _Replay.apply(node, hook, *tensors))

    def _run(self, call: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
        """Run both passes on the recordings' stream; return the output, and its tensor without its graph."""
        tracker, stream = self.tracker, self.tracker.stream
        tracker.stream = _STREAM
        try:
            with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"), cache_enabled=False):
                output = call()
                result = tensor_of(output)
            output = with_tensor(output, None)
            tracker.mark_saved()
            with tracker.during(BACKWARD), torch.autocast("cpu", enabled=False, cache_enabled=False):
                result.backward(torch.empty_like(result))
        finally:
            tracker.stream = stream
        return output, result.detach()


@dataclass(frozen=True)
class _Node:
    """The static tensors of a recording."""

    result: torch.Tensor
    inputs: Sequence[torch.Tensor]
    trained: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    output_gradient: torch.Tensor


class _Replay(torch.autograd.Function):  # type: ignore[misc]
    """The node that stands for a model in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, node: _Node, hook: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.node = node
        return node.result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        for weight, buffer in zip(ctx.node.trained, ctx.node.buffers, strict=True):
            if weight.grad is None:
                weight.grad = buffer
            else:
                weight.grad.add_(buffer)
        return (None, None, *(None if tensor.grad is None else tensor.grad.clone() for tensor in ctx.node.inputs))
