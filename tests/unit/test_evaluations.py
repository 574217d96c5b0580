"""Statistics of validations: paired errors, the best one, patience, and the mark of over-fitting."""

import math
import random

import pytest

from kohya_ext.run import evaluations
from kohya_ext.run.evaluations import Evaluation, Sample


def run(means, batches=8, spread=1.0, noise=0.0, held_out=True, seed=0):
    """Return evaluations of every 10 steps with these means; batches differ by ``spread``, and each loss by ``noise``."""
    chance = random.Random(seed)
    offsets = [spread * (batch / (batches - 1) - 0.5) for batch in range(batches)]
    return [
        Evaluation(
            10 * number, number, tuple(mean + each + chance.gauss(0, noise) for each in offsets), {"0-250": mean}, held_out
        )
        for number, mean in enumerate(means, 1)
    ]


def training(evaluated, last):
    """Return steps and losses that fall from 1 to ``last``."""
    steps = range(1, evaluated[-1].step + 1)
    return steps, [1 + (last - 1) * step / len(steps) for step in steps]


def test_samples_are_averaged_by_batch_and_by_band():
    samples = [
        Sample(batch, timestep, batch + timestep / 1000) for batch in (0, 2) for timestep in (200.0, 400.0, 600.0, 1000.0)
    ]
    measured = evaluations.evaluation(30, 2, samples, held_out=True)
    assert measured.losses == pytest.approx((0.55, 2.55))
    assert measured.loss == pytest.approx(1.55)
    assert measured.error == pytest.approx(1.0)  # two values that differ by 2: 2 / sqrt(2) / sqrt(2)
    assert dict(measured.bands) == pytest.approx({"0-250": 1.2, "250-500": 1.4, "500-750": 1.6, "750-1000": 2.0})
    assert evaluations.evaluation(30, 2, [*samples, Sample(3, None, math.nan)], held_out=True) is None
    assert evaluations.evaluation(30, 2, [], held_out=True) is None


def test_a_change_is_compared_batch_by_batch():
    first, second = run([1.0, 0.98], spread=2.0)
    change, error = second.change_from(first)
    assert first.error > 0.2
    assert (change, error) == (pytest.approx(-0.02), pytest.approx(0.0, abs=1e-12))
    assert "-2.0% since step 10, standard error 0.00%" in second.text(first)
    noisy = run([1.0, 0.98], spread=2.0, noise=0.1)
    _, error = noisy[1].change_from(noisy[0])
    needed = int(noisy[1].text(noisy[0]).rpartition("takes ")[2].split()[0])
    assert needed == math.ceil(8 * (2 * error / noisy[0].loss / 0.01) ** 2) > 100


def test_patience_counts_evaluations_without_an_improvement_beyond_the_noise():
    falling = run([1.0, 0.9, 0.8, 0.81, 0.805, 0.9])
    assert evaluations.best(falling).step == 30
    assert [evaluations.without_improvement(falling[:count]) for count in range(7)] == [0, 0, 0, 0, 1, 2, 3]
    slow = run([1 - 0.004 * number for number in range(12)], noise=0.02)
    steps = [evaluations.best(slow[: count + 1]).step for count in range(12)]
    assert 10 < len(set(steps)) * 4 < 40, "some changes are below the noise, and their sum is not"


def test_journal_lines_give_the_same_evaluations_and_a_repeated_step_counts_once():
    measured = run([1.0, 0.9, 0.8])
    lines = [
        {"kind": "validation", "step": each.step, **each.line()}
        for each in (measured[0], measured[1], measured[1], measured[2])
    ]
    assert evaluations.of_lines([{"kind": "save", "step": 5}, *lines]) == measured
    assert evaluations.of_lines([{"kind": "validation", "step": 10, "loss": 1.0}]) == []  # of an earlier version


TURNED = [1.0, 0.9, 0.82, 0.76, 0.72, 0.7, 0.69, 0.7, 0.715, 0.735, 0.76, 0.79, 0.82, 0.86]


@pytest.mark.parametrize("noise", [0.0, 0.005])
def test_over_fitting_began_where_validation_turned(noise):
    turned = run(TURNED, noise=noise)
    assert evaluations.overfitting(turned, *training(turned, 0.1)).step == 70
    long = run([1.0 - 0.02 * min(number, 40 - number) for number in range(40)], noise=noise)
    assert evaluations.overfitting(long, *training(long, 0.1)).step == pytest.approx(210, abs=20)


@pytest.mark.parametrize(
    ("means", "last", "options"),
    [
        ([1.0, 0.8, 0.7, 0.65, 0.64, 0.635, 0.63], 0.1, {}),  # still falls
        (TURNED, 3.0, {}),  # training rises, too: it diverges
        (TURNED, 0.1, {"held_out": False}),
        ([1.0, 0.8, 0.7, 0.703, 0.702, 0.704, 0.705], 0.1, {}),  # less than 1%
        (TURNED[:9], 0.1, {}),  # too few to know
        (TURNED[:10], 0.1, {"noise": 0.3, "seed": 3}),
    ],
)
def test_other_runs_are_not_marked(means, last, options):
    evaluated = run(means, **options)
    assert evaluations.overfitting(evaluated, *training(evaluated, last)) is None


def test_plateaus_with_weights_that_move_to_and_fro_are_rarely_marked():
    """All batches change together, so that the standard error of a difference is 0."""
    marked = 0
    for seed in range(200):
        chance = random.Random(seed)
        flat = run([0.9**number for number in range(10)] + [0.35 + chance.gauss(0, 0.01) for _ in range(20 + seed % 2 * 20)])
        marked += evaluations.overfitting(flat, *training(flat, 0.1)) is not None
    assert marked <= 14  # 7%


def test_no_evaluation_is_no_over_fitting():
    assert evaluations.overfitting([], [], []) is None
