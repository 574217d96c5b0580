"""Step times: the expected duration is printed only for settings that were measured."""

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
    return step_times.cache_key(SCRIPT, Namespace(resolution="1024", train_batch_size=1, **args), settings or Settings())


def test_key_ignores_output_and_run_length():
    assert key(output_dir="a", max_train_steps=10, learning_rate=1e-4) == key(output_dir="b", max_train_steps=99)


def test_key_depends_on_settings_that_change_the_computation():
    assert len({key(), key(network_dim=8), key(Settings(selective_torch_compile=True)), key(sdpa=True)}) == 4


def test_measurement_is_loaded_and_short_ones_are_not_stored():
    assert step_times.load(key()) is None
    step_times.store(key(), 1.5, step_times.MIN_STEPS - 1)
    assert step_times.load(key()) is None
    step_times.store(key(), 1.5, 100)
    assert step_times.load(key())[0] == 1.5
    assert step_times.load(key(network_dim=8)) is None


def test_preflight_notes_the_expected_duration(monkeypatch):
    def count(script, args, findings, settings):
        findings.steps = 5200

    monkeypatch.setattr(data, "check", count)
    step_times.store(step_times.cache_key(SCRIPT, Namespace(), Settings()), 1.5, 100)
    assert any("expected training time: 2 h 10 min (1.5 s per step with these settings on" in line for line in notes())


def notes():
    return preflight.inspect(SCRIPT, Namespace(), Settings()).notes


@pytest.mark.parametrize(
    ("seconds", "expected"), [(7800, "2 h 10 min"), (7200, "2 h"), (600, "10 min"), (40, "40 s"), (59.7, "60 s"), (0.2, "0 s")]
)
def test_duration_is_formatted(seconds, expected):
    assert step_times.format_duration(seconds) == expected
