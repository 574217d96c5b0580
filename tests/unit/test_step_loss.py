import contextlib
import importlib
import sys
import types

import pytest

from kohya_ext.patching.step_loss import step_loss, variables

LOOP = """
scale = 3

class Accelerator:
    ...

def decorated(function):
    return function

@decorated
def train(accelerator, data, inspect):
    offsets = [1, 2]
    for step, batch in enumerate(data):
        with accelerator.accumulate():
            parts = [batch * scale + offset for offset in offsets]
            loss = sum(parts)
            accelerator.backward(loss)
            parts = None
        inspect(step)

def without_a_loop(accelerator, data):
    accelerator.backward(data)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "script_with_a_loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("script_with_a_loop")
    sys.modules.pop("script_with_a_loop")


def test_the_loss_of_another_batch_leaves_the_loop_unchanged(script):
    accelerator = types.SimpleNamespace(accumulate=contextlib.nullcontext, backward=lambda loss: None)
    loss = step_loss(script.train.__code__)
    seen = []

    def inspect(step):
        frame = sys._getframe(1)
        seen.append((loss.of(variables(frame), 100), frame.f_locals["loss"], frame.f_locals["parts"]))

    script.train(accelerator, [1, 2], inspect)
    assert seen == [(603, 9, None), (603, 15, None)]


def test_the_frame_keeps_no_copies_of_its_variables(script):
    accelerator = types.SimpleNamespace(accumulate=contextlib.nullcontext, backward=lambda loss: None)

    class Batch(int):
        pass

    counts = []

    def inspect(step):
        frame = sys._getframe(1)
        before = sys.getrefcount(batch)
        variables(frame)
        counts.append(sys.getrefcount(batch) - before)

    batch = Batch(1)
    script.train(accelerator, [batch], inspect)
    assert counts == [0]


def test_a_function_without_a_loop_has_no_loss(script):
    assert step_loss(script.without_a_loop.__code__) is None
