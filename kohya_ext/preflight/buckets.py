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
        if min(self.resolution) < self._least:
            return (
                f"--min_bucket_reso {self.smallest} is larger than the resolution {_pair(self.resolution)}: "
                f"give --min_bucket_reso {min(self.resolution) // 2 // self.step * self.step or self.step}"
            )
        if max(self.resolution) > self._most:
            return (
                f"--max_bucket_reso {self.largest} is smaller than the resolution {_pair(self.resolution)}: "
                f"give --max_bucket_reso {2 * max(self.resolution)}"
            )
        return None

    @property
    def _least(self) -> int:
        """The smallest side as upstream uses it: a multiple of the step."""
        return self._down(self.smallest)

    @property
    def _most(self) -> int:
        return math.ceil(self.largest / self.step) * self.step

    def _down(self, side: float) -> int:
        return int(side) // self.step * self.step

    @cached_property
    def _boxes(self) -> list[tuple[int, int]]:
        """The sizes of all buckets: each side in steps, and no more pixels than the resolution."""
        area = self.resolution[0] * self.resolution[1]
        boxes = {(self._down(math.isqrt(area)),) * 2}
        for width in range(self._least or self.step, self._most + 1, self.step):
            height = min(self._most, self._down(area // width))
            if height >= self._least:
                boxes |= {(width, height), (height, width)}
        return sorted(boxes)

    def bucket(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size that an image of ``size`` (width, height) is trained at."""
        if not self.enabled:
            return self.resolution
        if self.no_upscale:
            width, height = self._shrunk(size)
            return self._down(width), self._down(height)
        return size if size in self._boxes else min(self._boxes, key=lambda box: abs(box[0] / box[1] - size[0] / size[1]))

    def _shrunk(self, size: tuple[int, int]) -> tuple[float, float]:
        """Return the size an image is scaled to where none is enlarged: one side in steps, whichever keeps its shape better."""
        area, aspect = self.resolution[0] * self.resolution[1], size[0] / size[1]
        if size[0] * size[1] <= area:
            return size
        width, height = self._down(math.sqrt(area * aspect) + 0.5), self._down(math.sqrt(area / aspect) + 0.5)
        by_width = abs(width / max(self._down(width / aspect + 0.5), 1) - aspect)
        by_height = abs(self._down(height * aspect + 0.5) / max(height, 1) - aspect)
        return (width, width / aspect + 0.5) if by_width < by_height else (height * aspect + 0.5, height)

    def is_cut(self, size: tuple[int, int]) -> bool:
        """Return whether the largest side of a bucket costs an image more than the usual share of its pixels."""
        width, height = self.bucket(size)
        too_few = width * height < _KEPT * self.resolution[0] * self.resolution[1]
        return self.enabled and not self.no_upscale and too_few and max(width, height) >= self._most


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
