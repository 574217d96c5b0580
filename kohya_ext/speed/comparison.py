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


class Sample(NamedTuple):
    """Evenly spaced elements of a tensor, and what there is to know about all of them."""

    values: torch.Tensor
    """In float32."""
    step: int
    """How many elements each of them stands for."""
    norm: torch.Tensor
    rounding: float
    """The largest relative error of rounding to the tensor's type; 0 for 32 bits."""

    @classmethod
    def of(cls, tensor: torch.Tensor, most: int = _MOST_ELEMENTS, device: torch.device | str = "cpu") -> Sample:
        """Return copies of about ``most`` elements on a device."""
        flat = tensor.detach().reshape(-1)
        step = 1 if flat.numel() <= most else flat.numel() // most | 1  # odd, so that they are from all rows and columns
        return cls(flat[::step].to(device, torch.float32, copy=True), step, _norm(flat), _rounding(flat))


class Results:
    """Tensors that a pass computes, an output and gradients or None."""

    def __init__(self, tensors: Sequence[torch.Tensor | Sample | None]) -> None:
        samples = [Sample.of(value) if isinstance(value, torch.Tensor) else value for value in tensors]
        self.samples = [None if sample is None else sample._replace(values=sample.values.cpu()) for sample in samples]
        known = [sample for sample in samples if sample is not None]
        self.rounding = max((sample.rounding for sample in known), default=0.0)
        """The largest relative error of rounding to the tensors' types; 0 for 32 bits."""
        self.is_finite = not known or bool(torch.stack([sample.norm for sample in known]).isfinite().all())
        """Whether all values are finite, also those outside the samples."""

    def minus(self, reference: Results) -> Difference:
        """Return the difference of all tensors together; infinite if a gradient is in one of both only."""
        if not self.is_finite:
            return Difference(math.nan, math.nan)
        squares = products = norms = 0.0
        for ours, theirs in zip(self.samples, reference.samples, strict=True):
            if (ours is None) != (theirs is None):
                return Difference(math.inf, math.inf)
            if ours is not None and theirs is not None:
                squares += ours.step * float((ours.values - theirs.values).square().sum())
                products += ours.step * float((ours.values * theirs.values).sum())
                norms += ours.step * float(theirs.values.square().sum())
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


def _rounding(tensor: torch.Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps) / 2 if tensor.is_floating_point() and tensor.element_size() < 4 else 0.0


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    precision = torch.float32 if tensor.element_size() < 4 else None
    return torch.linalg.vector_norm(tensor, dtype=precision).float()
