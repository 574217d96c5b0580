"""Rotate rows in blocks with a Hadamard matrix, which distributes outliers over each block.

An orthogonal matrix H leaves a product unchanged: ``(x H) (w H)^T = x w^T``. A Hadamard matrix over sqrt(n) is symmetric, so
it is its own inverse. Source: Ashkboos et al., "QuaRot", https://arxiv.org/abs/2404.00456, section 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch

#: Columns that are rotated together. Every layer width of the models is a multiple of it.
BLOCK = 64


def block_size(width: int) -> int:
    """Return the largest power of two up to :data:`BLOCK` that divides ``width``."""
    return math.gcd(width, BLOCK)


#: By how much a rotation can raise the largest element of a row: from 64 equal elements to one.
GROWTH = 8.0

#: Matrices by size, factor, dtype and device. Dynamo would trace through functools.cache.
_matrices: dict[tuple[int, float, torch.dtype, Any], torch.Tensor] = {}


def hadamard(size: int, dtype: torch.dtype, device: Any, factor: float = 1.0) -> torch.Tensor:
    """Return the orthogonal Hadamard matrix of a power of two, [size, size], multiplied by ``factor``.

    For a size of 64 and a factor that is a power of two, the elements are exact: 1/8 and -1/8 times the factor.
    Source: Sylvester's construction, https://en.wikipedia.org/wiki/Hadamard_matrix.
    """
    key = size, factor, dtype, device
    if key not in _matrices:
        matrix = torch.ones(1, 1)
        while len(matrix) < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        _matrices[key] = (matrix * (factor / math.sqrt(size))).to(device, dtype)
    return _matrices[key]


def rotate(rows: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return the rows [..., width] times ``factor``, each block of columns multiplied by the Hadamard matrix."""
    size = block_size(rows.shape[-1])
    return (rows.reshape(-1, size) @ hadamard(size, rows.dtype, rows.device, factor)).view(rows.shape)
