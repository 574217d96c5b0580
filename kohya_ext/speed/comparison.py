"""Differences between the results of two passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

#: Difference that rounding of the comparison itself may cause.
_ROUNDING = 1e-6


class Difference(NamedTuple):
    """How results differ from others."""

    share: float
    """Norm of the difference, as a share of the norm."""
    scale: float
    """Relative error of the scale: of the part that has the right direction."""


#: The largest difference of the output and all gradients of a model, in which rounding grows from layer to layer.
OF_MODEL = Difference(0.1, 0.01)


class Results:
    """Tensors that a pass computes, on the CPU: an output, and gradients or None."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.tensors = [None if tensor is None else tensor.detach().float().cpu() for tensor in tensors]

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return all(bool(tensor.isfinite().all()) for tensor in self.tensors if tensor is not None)

    def minus(self, reference: Results) -> Difference:
        """Return the difference of all tensors together; infinite if a gradient is in one of both only."""
        squares = products = norms = 0.0
        for ours, theirs in zip(self.tensors, reference.tensors, strict=True):
            if (ours is None) != (theirs is None):
                return Difference(math.inf, math.inf)
            if ours is not None and theirs is not None:
                squares += float((ours - theirs).square().sum())
                products += float((ours * theirs).sum())
                norms += float(theirs.square().sum())
        if norms == 0:
            return Difference(0.0, 0.0) if squares == 0 else Difference(math.inf, math.inf)
        return Difference(math.sqrt(squares / norms), products / norms - 1)

    def unlike(self, reference: Results, noise: float) -> str | None:
        """Return how exact results are wrong, if two eager passes differ by ``noise``; None if they are right."""
        share = self.minus(reference).share
        if share <= 2 * noise + _ROUNDING:
            return None
        return f"the gradients differ by {share:.2g} of their norm, and those of two eager passes by {noise:.2g}"

    def far_from(self, reference: Results, most: Difference = OF_MODEL) -> str | None:
        """Return how close results are wrong; None if they are right."""
        share, scale = self.minus(reference)
        if not share <= most.share:
            return f"the gradients differ by {share:.2g} of their norm, more than {most.share:.2g}"
        if not abs(scale) <= most.scale:
            return f"the gradients' scale differs by {scale:.2g}, more than {most.scale:.2g}"
        return None
