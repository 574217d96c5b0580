"""The gradients of an optimizer that steps during the backward pass, in passes that do not step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from kohya_ext.speed.comparison import Sample

#: Elements of a gradient that are kept: those of thousands of weights stay on the GPU until the pass is over.
_ELEMENTS = 2**12


class ReleasedGradients:
    """The gradients of those ``weights`` whose hooks step them and free their gradients, as with ``--fused_backward_pass``."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.samples: dict[torch.Tensor, Sample] = {}
        """Weight -> its gradient in the last pass."""
        self._weights = [weight for weight in weights if weight._post_accumulate_grad_hooks]

    @contextmanager
    def without_steps(self) -> Iterator[None]:
        """Take away the hooks inside the block."""
        hooks = [dict(weight._post_accumulate_grad_hooks) for weight in self._weights]
        for weight in self._weights:
            weight._post_accumulate_grad_hooks.clear()
        try:
            yield
        finally:
            for weight, own in zip(self._weights, hooks, strict=True):
                weight._post_accumulate_grad_hooks.update(own)

    @contextmanager
    def freed(self) -> Iterator[None]:
        """Sample and free each gradient inside the block, as soon as a backward pass has it."""
        with ExitStack() as stack:
            for weight in self._weights:
                stack.callback(weight.register_post_accumulate_grad_hook(self._take).remove)
            yield

    def _take(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None, "the hook is called after it"
        self.samples[weight] = Sample.of(weight.grad, _ELEMENTS, weight.device)
        weight.grad = None
