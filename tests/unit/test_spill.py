"""A slow step is called a spill where the card is full, and only there."""

import itertools

from kohya_ext.gpu.spill import STEPS, Watch

GB = 10**9
CARD = 16 * GB


def said(*steps: tuple[float, int, int]) -> list[str]:
    """What is said after each of some steps: (seconds, reserved, free)."""
    watch = Watch(CARD)
    return [line for step in steps if (line := watch.after_step(*step)) is not None]


def test_many_slow_steps_on_a_full_card_are_a_spill() -> None:
    fast, slow = (1.1, 15 * GB, GB // 10), (53.0, 15 * GB, GB // 10)
    lines = said(*[fast] * 10, *[slow] * STEPS)
    assert lines
    assert "steps take 53.0 s, and the fastest one took 1.1 s" in lines[0]
    assert "this run holds 15.00 GB on a card of 16.00 GB" in lines[0]


def test_a_card_that_holds_more_than_it_has_spills_at_once() -> None:
    assert said((60.0, 17 * GB, 0))


def test_other_slow_steps_are_none() -> None:
    fast, slow = (1.1, 15 * GB, GB // 10), (53.0, 15 * GB, GB // 10)
    with_room = (53.0, 10 * GB, 5 * GB)
    assert not said(*[fast] * 10, *[with_room] * 20), "the card has room: a slow disk, another program"
    assert not said(*[slow] * 3, *[fast] * 20), "the first steps compile"
    assert not said(*itertools.chain(*[[*[fast] * 6, slow]] * 10)), "saving and sampling take their time"
    assert not said(*[slow] * 20), "slow from the first step on and within the card: a slow card"
