"""Where a run stands, and finding the state to go on from."""

import os
import random
import sys
import zipfile
from types import SimpleNamespace

import pytest
from kohya_ext.patches import honest_resume

from kohya_ext import position
from kohya_ext.settings import Settings


def write_state(folder, name, age, without=(), cut=()):
    state = folder / name
    state.mkdir()
    for file in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        if file in without:
            continue
        with zipfile.ZipFile(state / file, "w") as archive:
            archive.writestr("data", bytes(100))
        if file in cut:
            (state / file).write_bytes((state / file).read_bytes()[:-30])
    os.utime(state, (1e9 - age, 1e9 - age))
    return state


def test_the_newest_whole_state_of_the_name_is_found(tmp_path, capsys):
    write_state(tmp_path, "cat-step00000100-state", 30)
    expected = write_state(tmp_path, "cat-000002-state", 20)
    write_state(tmp_path, "cat-rolling00000300-state", 10, without=["random_states_0.pkl"])
    write_state(tmp_path, "cat-state", 5, cut=["optimizer.bin"])
    write_state(tmp_path, "cat-big-state", 1)
    write_state(tmp_path, "cat-step00000400-state.partial", 1)
    assert position.newest_state(tmp_path, "cat") == expected
    said = capsys.readouterr().err
    assert "it has no random_states_0.pkl" in said
    assert "optimizer.bin is not whole" in said


def test_no_state_is_none(tmp_path):
    assert position.newest_state(tmp_path, "cat") is None


def test_a_running_functions_count_is_set():
    def train(steps):
        global_step = 0
        for _ in steps():
            global_step += 1
        return global_step

    def steps():
        yield 1
        assert position._set_local(sys._getframe().f_back, "global_step", 40)
        yield 2
        yield 3

    assert train(steps) == 42


def test_random_numbers_go_on():
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    import random

    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    state = position.random_state()
    first = draw()
    assert draw() != first
    position.set_random_state(state)
    assert draw() == first


def test_smaller_batches_and_more_of_them_accumulated_are_as_many_pictures(tmp_path):
    pytest.importorskip("torch")

    def at(accumulated, **stands):
        args = SimpleNamespace(gradient_accumulation_steps=accumulated, max_train_steps=9)
        return position.Position(args, SimpleNamespace(is_main_process=True), **stands)

    at(2, step=3, epoch=0, batch=6, _began={"counters": [0, 0]}).save(None, None, str(tmp_path))
    later = at(8)
    later.load(None, str(tmp_path))
    assert (later._goal["step"], later._goal["batch"]) == (3, 24)


def test_a_line_of_the_log_draws_no_random_number():
    def emit(self, record):  # as rich 14.1 does for its links
        drawn.append(random.random())

    drawn, before = [], random.getstate()
    honest_resume._emit(emit, Settings())(None, None)
    assert drawn
    assert random.getstate() == before
