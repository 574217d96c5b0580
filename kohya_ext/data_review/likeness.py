"""Which images are alike: near duplicates, and images with the same mark in a corner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kohya_ext.data_review.measures import CORNER

_DIFFERENT_BITS = 0.1
"""Share of a perceptual hash's bits up to which two images are near duplicates; unrelated ones differ in half of them."""

_SAME_MARK = 0.55
"""Correlation of two corners' edges from which on they show the same."""

_LEAST_MARKED = 3
"""Images with the same corner from which on it is a mark."""

_SHARE_OF_EDGES = (0.01, 0.5)
"""Shares of a corner's pixels that belong to edges, between which it can show a mark."""

_ROWS = 512
"""Images that are compared with all others in one step."""


def duplicates(hashes: Sequence[str]) -> list[list[int]]:
    """Return groups of images whose perceptual hashes hardly differ, by their indexes."""
    import numpy

    if not hashes:
        return []
    bits = numpy.unpackbits(numpy.array([list(bytes.fromhex(text)) for text in hashes], dtype=numpy.uint8), axis=1)
    signs = bits.astype(numpy.float32) * 2 - 1
    return _groups(signs, (1 - 2 * _DIFFERENT_BITS) * signs.shape[1], least=2)


def marked(corners: Sequence[bytes]) -> list[list[int]]:
    """Return groups of images whose corner shows the same edges, by their indexes."""
    import numpy

    if not corners:
        return []
    bits = numpy.unpackbits(numpy.array([list(corner) for corner in corners], dtype=numpy.uint8), axis=1)
    edges = bits.reshape(-1, *CORNER).astype(numpy.float32)
    vectors = numpy.stack([edges[:, 0] - edges[:, 1], edges[:, 2] - edges[:, 3]], axis=1).reshape(len(corners), -1)
    share = numpy.abs(vectors).mean(axis=1)
    vectors[(share < _SHARE_OF_EDGES[0]) | (share > _SHARE_OF_EDGES[1])] = 0
    lengths = numpy.linalg.norm(vectors, axis=1, keepdims=True)
    return _groups(vectors / numpy.maximum(lengths, 1e-6), _SAME_MARK, _LEAST_MARKED)


def _groups(vectors: Any, least_product: float, least: int) -> list[list[int]]:
    """Return the groups of at least ``least`` vectors that are connected by inner products of at least ``least_product``."""
    group = list(range(len(vectors)))

    def root(index: int) -> int:
        while group[index] != index:
            group[index] = group[group[index]]
            index = group[index]
        return index

    for left, right in _alike(vectors, least_product):
        group[root(right)] = root(left)
    members: dict[int, list[int]] = {}
    for index in range(len(vectors)):
        members.setdefault(root(index), []).append(index)
    return [indexes for indexes in members.values() if len(indexes) >= least]


def _alike(vectors: Any, least_product: float) -> Iterator[tuple[int, int]]:
    import numpy

    for first in range(0, len(vectors), _ROWS):
        products = vectors[first : first + _ROWS] @ vectors.T
        for row, column in zip(*numpy.nonzero(products >= least_product), strict=True):
            if first + row < column:
                yield first + int(row), int(column)
