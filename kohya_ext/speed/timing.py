"""Time a model's passes until they show how long they take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Generic, TypeVar

from kohya_ext.compiling.eager_steps import BUSY, Clock, Meter

#: Seconds of all passes, and the fewest and most of them.
_SECONDS, _FEWEST, _MOST = 1.5, 3, 9

#: Two passes are enough if they differ by this share of their seconds at most.
_CALM = 0.01

Result = TypeVar("Result")


@dataclass
class TimedPasses(Generic[Result]):
    """Passes that are timed, each from an idle device until the device has finished it. The first one must be warm.

    ``run`` runs both passes, after ``prepare``.
    """

    prepare: Callable[[], None]
    run: Callable[[], Result]
    clock: Clock
    meter: Meter | None = None
    _host: list[float] = field(default_factory=list)
    _device: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.meter is not None:
            self.meter.begin()

    def once(self) -> Result:
        """Run and time both passes."""
        self.prepare()
        start = self.clock.mark()
        result = self.run()
        host, device = self.clock.seconds(start, self.clock.mark())
        self._host.append(host)
        self._device.append(device)
        return result

    def until_known(self) -> None:
        """Time as many passes as their seconds need: fewer if they are long and hardly differ."""
        while not _are_enough(self.seconds):
            self.once()

    @property
    def seconds(self) -> list[float]:
        """The seconds of each pass: the host's or the device's, whichever takes longer."""
        return [max(pair) for pair in zip(self._host, self._device, strict=True)]

    @property
    def spread(self) -> float:
        """The distance of the quartiles in seconds; of both passes, if there are two."""
        seconds = self.seconds
        if len(seconds) < _FEWEST:
            return max(seconds) - min(seconds)
        lower, _, upper = quantiles(seconds, n=4, method="inclusive")
        return upper - lower

    @property
    def peak(self) -> int:
        """The bytes of temporary tensors at their peak; 0 without a meter."""
        return self.meter.end() if self.meter is not None else 0

    @property
    def is_limited_by_device(self) -> bool:
        """Whether the device finishes long after the host has launched its work."""
        return median(self._device) > BUSY * median(self._host)


def _are_enough(seconds: Sequence[float]) -> bool:
    if sum(seconds) >= _SECONDS or len(seconds) == _MOST:
        return len(seconds) >= _FEWEST or (len(seconds) == 2 and max(seconds) - min(seconds) <= _CALM * sum(seconds) / 2)
    return False
