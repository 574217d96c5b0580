"""--ddp_average_once and --ddp_gradient_compression with two processes: upstream's training, with fewer bytes."""

import pytest

from kohya_ext.estimate.communication import Engine
from tests.real.test_communication import GROUPS, SPY, counted, predicted, words_of
from tests.real.test_losing_nothing import FULL, LORA, SCRIPTS, posix, same, write_images_with_nan

torch = pytest.importorskip("torch")

pytestmark = [posix, pytest.mark.thorough]

RECORDED = {**SPY, "SPY_LOSSES": "1"}
TWICE = GROUPS[0]
ONCE = "--ddp_average_once"
BF16 = ("--ddp_gradient_compression", "bf16")


def relative_change(run, reference, start):
    """Return how much two runs differ, relative to the reference's updates since ``start``: a ratio of Euclidean norms."""
    differences, updates = 0.0, 0.0
    for name, tensor in reference.tensors.items():
        differences += (run.tensors[name] - tensor).double().square().sum()
        updates += (tensor - start.tensors[name]).double().square().sum()
    return float((differences / updates) ** 0.5)


@pytest.fixture(scope="module")
def averaged_by_upstream(train):
    """(checkout, script) -> two runs of two processes that accumulate two batches: after three steps, and after one."""
    runs = {}

    def of(checkout, script):
        key = (checkout.layout, script)
        if key not in runs:
            options = {"env": RECORDED, "ranks": 2}
            first = train(checkout, script, *words(script), "--max_train_steps", "1", **options)
            runs[key] = train(checkout, script, *words(script), **options), first
        return runs[key]

    return of


def words(script):
    unet = ("--network_train_unet_only",) if script == LORA else ()
    return (*words_of(TWICE), "--optimizer_type", "SGDNesterov", "--learning_rate", "0.01", *unet)


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_averaging_once_is_the_same_training_with_half_the_bytes_of_a_fine_tune(checkout, train, averaged_by_upstream, scripts):
    script = scripts[checkout.layout]
    upstream, first = averaged_by_upstream(checkout, script)
    run = train(checkout, script, *words(script), ONCE, "--ddp_gradient_as_bucket_view", env=RECORDED, ranks=2)
    engine = Engine.DDP if script == FULL else Engine.LORA
    assert counted(run, TWICE) == predicted(run, engine, TWICE, averages_once=True)
    assert run.losses == pytest.approx(upstream.losses, abs=1e-4)
    assert relative_change(run, upstream, first) < 1e-4
    if script == LORA:
        assert run.report["facts"]["gradient_averaging"]["bucketed_operations"] == 3
        assert same(run.tensors, upstream.tensors)  # two numbers have one sum


@pytest.mark.parametrize("scripts", SCRIPTS)
def test_bf16_halves_the_bytes_and_changes_updates_by_less_than_one_percent(checkout, train, averaged_by_upstream, scripts):
    script = scripts[checkout.layout]
    upstream, first = averaged_by_upstream(checkout, script)
    run = train(checkout, script, *words(script), *BF16, env=RECORDED, ranks=2)
    engine = Engine.DDP if script == FULL else Engine.LORA
    assert counted(run, TWICE) == predicted(run, engine, TWICE, gradient_bytes=2)
    assert run.losses == pytest.approx(upstream.losses, abs=1e-3)
    assert 0 < relative_change(run, upstream, first) < 0.01
    assert {tensor.dtype for tensor in run.tensors.values()} == {tensor.dtype for tensor in upstream.tensors.values()}


@pytest.mark.slow
def test_all_processes_skip_a_step_that_is_not_finite(checkout, train, tmp_path):
    write_images_with_nan(tmp_path)
    data = ("--train_data_dir", str(tmp_path), "--cache_latents_to_disk", "--caching_workers", "0")
    run = train(checkout, FULL, *data, *BF16, ONCE, "--max_train_steps", "8", "--nan_patience", "8", ranks=2)
    assert run.code == 0, run.output[-5000:]
    assert "skipped: loss or gradient is not finite" in run.output
    assert all(tensor.isfinite().all() for tensor in run.tensors.values())


@pytest.mark.newest
@pytest.mark.parametrize("option", [BF16, (ONCE,)], ids=lambda words: words[0])
def test_one_process_has_nothing_to_average(checkout, train, option):
    run = train(checkout, LORA, *option)
    assert run.code == 2, run.output[-3000:]
    assert f"{option[0]} needs several processes" in run.output
    assert "load StableDiffusion checkpoint" not in run.output
