"""Values for the trackers and for the progress bar, from the lines of the journal."""

import io
from types import SimpleNamespace

import pytest
from kohya_ext.patches import progress_memory, tracker_values

from kohya_ext.config.settings import Settings
from kohya_ext.run import journal
from kohya_ext.run.journal import Journal

STEP = {
    "step": 7,
    "loss": 0.5,
    "seconds": 1.5,
    "data": 0.25,
    "outside": 0.0,
    "allocated": 9 * 10**9,
    "reserved": 11_900_000_000,
    "peak_allocated": 10**10,
    "peak_reserved": 12 * 10**9,
}


class Tracker:
    def __init__(self, name):
        self.name = name
        self.calls = []

    def log(self, values, **kwargs):
        self.calls.append((dict(values), kwargs))


@pytest.fixture
def written(tmp_path):
    return Journal(tmp_path / "cat.journal.jsonl", "cat")


@pytest.fixture
def accelerator():
    return SimpleNamespace(is_main_process=True, trackers=[], device=SimpleNamespace(type="cuda"))


def test_values_of_a_step(written, accelerator):
    accelerator.trackers = [Tracker("tensorboard"), Tracker("wandb")]
    tracking = tracker_values._start(None, accelerator, Settings())
    written.write("step", **STEP)
    written.write("save", step=7)
    tracking.on_end()
    written.write("step", **STEP)
    values = {
        "memory/allocated_GB": 9.0,
        "memory/reserved_GB": 11.9,
        "memory/peak_allocated_GB": 10.0,
        "memory/peak_reserved_GB": 12.0,
        "seconds/step": 1.5,
        "seconds/waiting_for_data": 0.25,
        "seconds/between_steps": 0.0,
    }
    # With a step of its own, wandb would end the row and drop upstream's later values of it.
    assert [tracker.calls for tracker in accelerator.trackers] == [[(values, {"step": 7})], [(values, {"commit": False})]]


def test_tracker_that_fails_is_left_out_once(written, accelerator, capsys):
    class Broken(Tracker):
        def log(self, values, **kwargs):
            super().log(values, **kwargs)
            raise RuntimeError("no disk")

    accelerator.trackers = [Broken("tensorboard")]
    tracker_values._start(None, accelerator, Settings())
    for _ in range(2):
        written.write("step", **STEP)
    assert len(accelerator.trackers[0].calls) == 1
    assert "memory and times are not sent to the trackers: RuntimeError: no disk" in capsys.readouterr().err
    assert journal._listeners == []


@pytest.mark.parametrize(("description", "expected"), [("steps", "memory=11.9/25.8GB"), ("validation", "a=1")])
def test_progress_bar_shows_memory(written, accelerator, monkeypatch, description, expected):
    tqdm = pytest.importorskip("tqdm").tqdm
    memory = progress_memory._start(None, accelerator, Settings())
    monkeypatch.setattr(progress_memory, "observe", lambda kind, action: action(memory))
    monkeypatch.setattr(tqdm, "set_postfix", progress_memory._set_postfix(tqdm.set_postfix, Settings()))
    with tqdm(total=2, desc=description, disable=False, file=io.StringIO()) as bar:
        bar.set_postfix(a=1)
        assert bar.postfix == "a=1"
        written.write("start", gpu={"name": "RTX 4090", "memory": 25_757_220_864})
        written.write("step", **STEP)
        bar.set_postfix(a=1)
        assert bar.postfix.endswith(expected)
    memory.on_end()


def test_progress_bar_of_the_cpu_is_upstreams(accelerator):
    accelerator.device.type = "cpu"
    assert progress_memory._start(None, accelerator, Settings()) is None
    assert journal._listeners == []
