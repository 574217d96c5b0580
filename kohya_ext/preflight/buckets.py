"""The sizes that images are trained at, as sd-scripts' aspect ratio buckets have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#: An image that loses no more than the rest of its pixels to steps of the bucket sizes is not worth a word.
_KEPT = 0.85


@dataclass(frozen=True)
class Buckets:
    """A dataset's bucket options; lengths in pixels."""

    resolution: tuple[int, int]
    enabled: bool = False
    no_upscale: bool = False
    smallest: int = 256
    largest: int = 1024
    step: int = 64

    def problem(self) -> str | None:
        """Return in words why upstream would refuse the options; None when it takes them."""
        if not self.enabled:
            return None
        least = self.smallest - self.smallest % self.step
        most = math.ceil(self.largest / self.step) * self.step
        if min(self.resolution) < least:
            return (
                f"--min_bucket_reso {self.smallest} is larger than the resolution {_pair(self.resolution)}: "
                f"give --min_bucket_reso {min(self.resolution) // 2 // self.step * self.step or self.step}"
            )
        if max(self.resolution) > most:
            return (
                f"--max_bucket_reso {self.largest} is smaller than the resolution {_pair(self.resolution)}: "
                f"give --max_bucket_reso {2 * max(self.resolution)}"
            )
        return None

    @cached_property
    def _boxes(self) -> list[tuple[int, int]]:
        """The sizes of all buckets: each side in steps, and no more pixels than the resolution."""
        area = self.resolution[0] * self.resolution[1]
        square = math.isqrt(area) // self.step * self.step
        boxes = {(square, square)}
        for width in range(self.smallest - self.smallest % self.step or self.step, self.largest + 1, self.step):
            height = min(self.largest, area // width // self.step * self.step)
            if height >= self.smallest:
                boxes |= {(width, height), (height, width)}
        return sorted(boxes)

    def bucket(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size that an image of ``size`` (width, height) is trained at."""
        if not self.enabled:
            return self.resolution
        width, height = size
        if self.no_upscale:
            scale = min(1.0, math.sqrt(self.resolution[0] * self.resolution[1] / (width * height)))
            width, height = (round(side * scale) // self.step * self.step for side in size)
            return width, height
        return size if size in self._boxes else min(self._boxes, key=lambda box: abs(box[0] / box[1] - width / height))

    def is_cut(self, size: tuple[int, int]) -> bool:
        """Return whether the largest side of a bucket costs an image more than the usual share of its pixels."""
        width, height = self.bucket(size)
        too_few = width * height < _KEPT * self.resolution[0] * self.resolution[1]
        return self.enabled and not self.no_upscale and too_few and max(width, height) >= self.largest


def of(options: Mapping[str, Any], resolution: tuple[int, int]) -> Buckets:
    """Return the buckets for a script's arguments, or those of a subset in a dataset config."""

    def number(name: str, default: int) -> int:
        value = options.get(name)
        return value if isinstance(value, int) and value > 0 else default

    return Buckets(
        resolution,
        bool(options.get("enable_bucket")),
        bool(options.get("bucket_no_upscale")),
        number("min_bucket_reso", 256),
        number("max_bucket_reso", 1024),
        number("bucket_reso_steps", 64),
    )


def _pair(resolution: tuple[int, int]) -> str:
    return "x".join(map(str, resolution))
