"""Seconds of a training step on a GPU, from its counted work. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Kinds of kernels that are not matrix products; those are named by their operands' type: 16 bits, fp32, fp8, int8.
MEMORY, CONVOLUTION, ATTENTION, ATTENTION_BACKWARD = "memory", "convolution", "attention", "attention backward"


class Kernels(NamedTuple):
    """Kernels of one kind and of similar size."""

    kind: str
    count: int
    flops: float
    """FLOPs of all of them."""
    bytes: float
    """Bytes that all of them read and write."""


@dataclass(frozen=True)
class Work:
    """The kernels of one optimizer step."""

    batch: Sequence[Kernels]
    """Forward, recomputation and backward of one micro-batch."""
    optimizer: Sequence[Kernels]
    copied: float = 0
    """Bytes that one micro-batch copies between host and GPU: swapped blocks."""

    def as_row(self) -> dict[str, Any]:
        """Return the same as JSON, rounded to four digits: FLOPs in 1e9, bytes in 1e6."""
        parts = {"batch": self.batch, "optimizer": self.optimizer}
        rows = {
            name: [[group.kind, group.count, _rounded(group.flops / 1e9), _rounded(group.bytes / 1e6)] for group in groups]
            for name, groups in parts.items()
        }
        return {**rows, "copied": _rounded(self.copied / 1e6)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Work:
        """Return the work of :meth:`as_row`'s JSON."""
        batch, optimizer = (
            [Kernels(kind, count, flops * 1e9, size * 1e6) for kind, count, flops, size in row[name]]
            for name in ("batch", "optimizer")
        )
        return cls(batch, optimizer, row["copied"] * 1e6)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
