"""Compute weights from the 8-bit values and the scales of a file (:mod:`kohya_ext.run.stored_weights`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from kohya_ext.run.stored_weights import Stored, blocks

DTYPE = torch.bfloat16
"""The precision of the weights: that of the file as it would be without 8 bits. Eight bits times a scale lose little in it."""

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}


@dataclass(frozen=True)
class Scaling:
    """What makes weights of a tensor's values: multiply them by scales, and turn rotated rows back."""

    scales: torch.Tensor
    """One for all values, one for each row, or one for each block of a matrix."""
    rotation: int
    """The number of columns that are rotated together; 0 without a rotation."""

    def weights(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weights of a tensor's values, computed in float32 and rounded once to :data:`DTYPE`, on its device."""
        down, right = self._blocks(values)
        scales = self.scales.to(values.device, torch.float32)
        scaled = values.float()  # a copy
        if scales.numel():
            scaled.view(down, -1, right, scaled[0].numel() // right if scaled.ndim else 1).mul_(scales.view(down, 1, right, 1))
        if self.rotation:
            scaled = (scaled.view(-1, self.rotation) @ _rotation(self.rotation).to(scaled.device)).view(values.shape)
        return scaled.to(DTYPE)

    def row_scales(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return the fp32 scales of a matrix's rows, which have no rotation; None if it has other ones."""
        down, right = self._blocks(values)
        if self.rotation or values.ndim != 2 or right != 1 or down not in (1, len(values)) or not self.scales.numel():
            return None
        return self.scales.float().reshape(-1).expand(len(values)).clone()

    def _blocks(self, values: torch.Tensor) -> tuple[int, int]:
        fitting = blocks(tuple(values.shape), tuple(self.scales.shape))
        assert fitting is not None  # checked when the file's header was read
        return fitting


def values_of(tensor: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Return a file's tensor as the type of its values, which some files store as bytes of no type."""
    dtype = _DTYPES.get(stored.dtype)
    return tensor if dtype is None else tensor.view(dtype)


@functools.cache
def _rotation(size: int) -> Any:
    """Return the regular Hadamard matrix of a power of four, [size, size] in float32, which is its own inverse.

    Source: the Kronecker power of a symmetric matrix with equal sums of rows, as in https://github.com/Comfy-Org/comfy-kitchen
    (``int8_utils``).
    """
    seed = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix, seed)
    return matrix / math.sqrt(size)
