"""A time is said only where it was measured."""

from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext import preflight
from kohya_ext.config.settings import Settings
from kohya_ext.preflight import data
from kohya_ext.run import step_times

SCRIPT = Path("sdxl_train_network.py")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path))


def key(settings=None, **args):
    return step_times.identify(SCRIPT, Namespace(resolution="1024", train_batch_size=1, **args), settings or Settings())


def test_where_it_goes_and_how_long_it_lasts_does_not_matter():
    assert key(output_dir="a", max_train_steps=10, learning_rate=1e-4) == key(output_dir="b", max_train_steps=99)


def test_what_is_computed_does():
    assert len({key(), key(network_dim=8), key(Settings(selective_torch_compile=True)), key(sdpa=True)}) == 4


def test_a_measurement_is_found_again_and_few_steps_are_none():
    assert step_times.known(key()) is None
    step_times.remember(key(), 1.5, step_times.FEWEST - 1)
    assert step_times.known(key()) is None
    step_times.remember(key(), 1.5, 100)
    assert step_times.known(key())[0] == 1.5
    assert step_times.known(key(network_dim=8)) is None


def test_preflight_says_it(monkeypatch):
    def count(script, args, found):
        found.steps = 5200

    monkeypatch.setattr(data, "check", count)
    step_times.remember(step_times.identify(SCRIPT, Namespace(), Settings()), 1.5, 100)
    assert any("about 2 h 10 min of training: a step with these settings took 1.5 s on" in line for line in notes())


def notes():
    return preflight.inspect(SCRIPT, Namespace(), Settings()).notes


@pytest.mark.parametrize(
    ("seconds", "said"), [(7800, "2 h 10 min"), (7200, "2 h"), (600, "10 min"), (40, "40 s"), (59.7, "60 s"), (0.2, "0 s")]
)
def test_it_is_said_in_words(seconds, said):
    assert step_times.in_words(seconds) == said
