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


#: The most elements of a tensor that are compared: the gradients of a whole model would not fit into the host's memory.
_MOST_ELEMENTS = 2**16


class Results:
    """Tensors that a pass computes, an output and gradients or None: evenly spaced elements of them, on the CPU."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        detached = [None if tensor is None else tensor.detach() for tensor in tensors]
        self.samples = [None if tensor is None else tensor.reshape(-1)[:: _step(tensor)].float().cpu() for tensor in detached]
        self.steps = [1 if tensor is None else _step(tensor) for tensor in detached]
        """How many elements each element of a sample stands for."""
        self.rounding = max((_rounding(tensor) for tensor in detached if tensor is not None), default=0.0)
        """The largest relative error of rounding to the tensors' types; 0 for 32 bits."""
        norms = [_norm(tensor) for tensor in detached if tensor is not None]
        self.is_finite = not norms or bool(torch.stack(norms).isfinite().all())
        """Whether all values are finite, also those outside the samples."""

    def minus(self, reference: Results) -> Difference:
        """Return the difference of all tensors together; infinite if a gradient is in one of both only."""
        if not self.is_finite:
            return Difference(math.nan, math.nan)
        squares = products = norms = 0.0
        for ours, theirs, step in zip(self.samples, reference.samples, self.steps, strict=True):
            if (ours is None) != (theirs is None):
                return Difference(math.inf, math.inf)
            if ours is not None and theirs is not None:
                squares += step * float((ours - theirs).square().sum())
                products += step * float((ours * theirs).sum())
                norms += step * float(theirs.square().sum())
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


def _step(tensor: torch.Tensor) -> int:
    """Return the distance of the elements that are compared: odd, so that they are from all rows and columns."""
    return 1 if tensor.numel() <= _MOST_ELEMENTS else tensor.numel() // _MOST_ELEMENTS | 1


def _rounding(tensor: torch.Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) / 2 if tensor.is_floating_point() and tensor.element_size() < 4 else 0.0


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    precision = torch.float32 if tensor.element_size() < 4 else None
    return torch.linalg.vector_norm(tensor, dtype=precision).float()
