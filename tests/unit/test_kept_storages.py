"""What a step's micro-steps replace: storages that the last one of the step before has left."""

import pytest

pytest.importorskip("torch")

from kohya_ext.estimate.events import Event
from kohya_ext.estimate.step import _Kept, _replacing

CAPTIONS, IMAGES, LATENTS, NOISE, LOSS = range(5)


def test_a_network_trainer_replaces_the_batch_at_once():
    kept = _Kept([CAPTIONS, CAPTIONS, IMAGES], [], [LOSS])
    assert kept.replaces(kept) == {IMAGES: [CAPTIONS, IMAGES], LOSS: [LOSS]}


def test_outputs_of_a_trained_text_encoder_come_after_the_batch_that_they_become_part_of():
    computed = 5
    kept = _Kept([CAPTIONS, computed, IMAGES], [], [LOSS], loaded=[CAPTIONS, IMAGES])
    assert kept.replaces(kept) == {IMAGES: [CAPTIONS, IMAGES, computed], LOSS: [LOSS]}


def test_a_finetune_replaces_variables_when_it_assigns_them():
    kept = _Kept([CAPTIONS, IMAGES], [LATENTS, CAPTIONS, NOISE], [LOSS])
    assert kept.replaces(kept) == {IMAGES: [IMAGES], LATENTS: [LATENTS, CAPTIONS], NOISE: [NOISE], LOSS: [LOSS]}


def test_cached_latents_are_part_of_the_batch():
    kept = _Kept([CAPTIONS, LATENTS], [LATENTS, CAPTIONS], [LOSS])
    replaced = kept.replaces(kept)
    assert (sorted(replaced[LATENTS]), replaced[LOSS]) == ([CAPTIONS, LATENTS], [LOSS])


def test_the_first_micro_step_replaces_what_the_last_one_of_the_step_before_has_left():
    first, last = _Kept([0, 1], [2, 0], [3]), _Kept([10, 11], [12, 10], [13])
    assert first.replaces(last) == {1: [11], 2: [12, 10], 3: [13]}


def test_captions_that_are_unpacked_last_are_replaced_last():
    kept = _Kept([CAPTIONS, IMAGES], [LATENTS, CAPTIONS, NOISE], [LOSS], captions_last=True)
    assert kept.replaces(kept) == {IMAGES: [IMAGES], LATENTS: [LATENTS], NOISE: [NOISE, CAPTIONS], LOSS: [LOSS]}


def test_a_micro_step_frees_what_it_replaces_of_the_one_before():
    first, second = _Kept([0], [0, 1], [2]), _Kept([3], [3, 4], [5])
    sizes = {0: 8, 1: 16, 6: 99, 2: 4, 3: 8, 4: 16, 5: 4}
    log = [Event(storage, size, "forward") for storage, size in sizes.items()]
    freed = [(event.storage, event.bytes) for event in _replacing(log, [first, second])]
    assert freed == [(0, 8), (1, 16), (6, 99), (2, 4), (3, 8), (0, -8), (4, 16), (1, -16), (5, 4), (2, -4)]


def test_what_both_micro_steps_hold_is_not_freed():
    first, second = _Kept([0], [0, 9], [2]), _Kept([3], [3, 9], [5])
    log = [Event(storage, 4, "forward") for storage in (0, 9, 2, 3, 5)]
    assert [event.storage for event in _replacing(log, [first, second]) if event.bytes < 0] == [0, 2]
