"""Slow steps are reported as a spill only on a full GPU."""

import itertools

from kohya_ext.gpu.spill import STEPS, SpillDetector

GB = 10**9
CARD = 16 * GB


def warnings(*steps: tuple[float, int, int]) -> list[str]:
    """Return the warnings after some steps of (seconds, reserved, free)."""
    detector = SpillDetector(CARD)
    return [line for step in steps if (line := detector.after_step(*step)) is not None]


def test_slow_steps_on_a_full_gpu_are_a_spill() -> None:
    fast, slow = (1.1, 15 * GB, GB // 10), (53.0, 15 * GB, GB // 10)
    lines = warnings(*[fast] * 10, *[slow] * STEPS)
    assert lines
    assert "steps take 53.0 s, the fastest took 1.1 s" in lines[0]
    assert "this run reserves 15.00 GB on a GPU of 16.00 GB" in lines[0]


def test_reserving_more_than_the_gpu_has_is_a_spill() -> None:
    assert warnings((60.0, 17 * GB, 0))


def test_other_slow_steps_are_not_a_spill() -> None:
    fast, slow = (1.1, 15 * GB, GB // 10), (53.0, 15 * GB, GB // 10)
    with_room = (53.0, 10 * GB, 5 * GB)
    assert not warnings(*[fast] * 10, *[with_room] * 20), "free memory: a slow disk, another program"
    assert not warnings(*[slow] * 3, *[fast] * 20), "the first steps compile"
    assert not warnings(*itertools.chain(*[[*[fast] * 6, slow]] * 10)), "saving and sampling are slow"
    assert not warnings(*[slow] * 20), "slow from the first step on: a slow GPU"
