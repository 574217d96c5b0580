"""Compute weights from the 8-bit values and the scales of a file (:mod:`kohya_ext.run.scaled_checkpoints`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch

from kohya_ext.run.scaled_checkpoints import Stored, blocks

DTYPE = torch.bfloat16
"""The precision of the weights: that of the file as it would be without 8 bits. Eight bits times a scale lose little in it."""

_ELEMENTS = 1 << 24
"""The number of values that are computed together, which limits temporary memory."""

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
        scales = self.scales if self.scales.numel() else self.scales.new_ones(1)
        scales = scales.to(values.device, torch.float32).view(down, 1, right, 1)
        # Parts have whole rows, which are rotated, and whole blocks of rows, if there are several.
        blocks_of_values = values.reshape(down, -1, right, values[0].numel() // right if values.ndim else 1)
        dimension = 0 if down > 1 else 1
        size = max(1, _ELEMENTS // max(1, blocks_of_values.select(dimension, 0).numel()))
        weights = torch.empty(values.shape, dtype=DTYPE, device=values.device)
        parts = zip(
            blocks_of_values.split(size, dimension), weights.view(blocks_of_values.shape).split(size, dimension), strict=True
        )
        for index, (part, target) in enumerate(parts):
            factors = scales[index * size : (index + 1) * size] if down > 1 else scales
            target.copy_(self._turned_back(part.float() * factors))
        return weights

    def _turned_back(self, scaled: torch.Tensor) -> torch.Tensor:
        if not self.rotation:
            return scaled
        return (scaled.reshape(-1, self.rotation) @ _rotation(self.rotation).to(scaled.device)).view(scaled.shape)

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
