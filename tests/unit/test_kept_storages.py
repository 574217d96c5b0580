"""What a step's micro-steps replace: storages that the last one of the step before has left."""

import pytest

pytest.importorskip("torch")

from kohya_ext.estimate.step import _Kept

CAPTIONS, IMAGES, LATENTS, NOISE, LOSS = range(5)


def test_a_network_trainer_replaces_the_batch_at_once():
    kept = _Kept([CAPTIONS, CAPTIONS, IMAGES], [], [LOSS])
    assert kept.replaces(kept) == {IMAGES: [CAPTIONS, IMAGES], LOSS: [LOSS]}


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
