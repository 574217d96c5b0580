"""Training sizes of images in sd-scripts' aspect ratio buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

#: Smallest usual ratio of a bucket's area to the resolution's; the rest is lost to rounding to bucket steps.
_USUAL_AREA = 0.85


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
        """Return why upstream rejects the options; None when it accepts them."""
        if not self.enabled:
            return None
        if min(self.resolution) < self._min_side:
            return (
                f"--min_bucket_reso {self.smallest} is larger than the resolution {_format(self.resolution)}; "
                f"use --min_bucket_reso {min(self.resolution) // 2 // self.step * self.step or self.step}"
            )
        if max(self.resolution) > self._max_side:
            return (
                f"--max_bucket_reso {self.largest} is smaller than the resolution {_format(self.resolution)}; "
                f"use --max_bucket_reso {2 * max(self.resolution)}"
            )
        return None

    @property
    def _min_side(self) -> int:
        """The smallest side of a bucket; upstream rounds it down to a multiple of the step."""
        return self._round_down(self.smallest)

    @property
    def _max_side(self) -> int:
        return math.ceil(self.largest / self.step) * self.step

    def _round_down(self, side: float) -> int:
        return int(side) // self.step * self.step

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """The (width, height) of all buckets: multiples of the step, with no more pixels than the resolution."""
        area = self.resolution[0] * self.resolution[1]
        sizes = {(self._round_down(math.isqrt(area)),) * 2}
        for width in range(self._min_side or self.step, self._max_side + 1, self.step):
            height = min(self._max_side, self._round_down(area // width))
            if height >= self._min_side:
                sizes |= {(width, height), (height, width)}
        return sorted(sizes)

    def bucket(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the training size of an image of ``size``; both are (width, height) in pixels."""
        if not self.enabled:
            return self.resolution
        if self.no_upscale:
            width, height = self._shrunk(size)
            return self._round_down(width), self._round_down(height)
        return size if size in self._sizes else min(self._sizes, key=lambda other: abs(other[0] / other[1] - size[0] / size[1]))

    def _shrunk(self, size: tuple[int, int]) -> tuple[float, float]:
        """Return an image's size after scaling with ``no_upscale``. The side that is rounded keeps the aspect ratio better."""
        area, aspect = self.resolution[0] * self.resolution[1], size[0] / size[1]
        if size[0] * size[1] <= area:
            return size
        width, height = self._round_down(math.sqrt(area * aspect) + 0.5), self._round_down(math.sqrt(area / aspect) + 0.5)
        by_width = abs(width / max(self._round_down(width / aspect + 0.5), 1) - aspect)
        by_height = abs(self._round_down(height * aspect + 0.5) / max(height, 1) - aspect)
        return (width, width / aspect + 0.5) if by_width < by_height else (height * aspect + 0.5, height)

    def is_reduced(self, size: tuple[int, int]) -> bool:
        """Return whether the limit on a bucket's side costs an image more pixels than rounding does."""
        width, height = self.bucket(size)
        too_few = width * height < _USUAL_AREA * self.resolution[0] * self.resolution[1]
        return self.enabled and not self.no_upscale and too_few and max(width, height) >= self._max_side


def of(options: Mapping[str, Any], resolution: tuple[int, int]) -> Buckets:
    """Return the buckets for a script's arguments, or for the options of a subset in a dataset config."""

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


def _format(resolution: tuple[int, int]) -> str:
    return "x".join(map(str, resolution))
