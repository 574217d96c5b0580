"""Inductor's timing of kernels leaves no gaps in the allocator's memory."""

import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
configuration = pytest.importorskip("kohya_ext.compiling.configuration")


def test_kernels_are_timed_in_their_own_memory(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def pooled(pool):
        entered.append(pool)
        yield
        entered.append("left")

    monkeypatch.setattr(torch.cuda, "MemPool", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", pooled)
    timed = configuration.autotune_in_own_memory(lambda kernel, *args: [*entered, *args], None)
    assert timed(SimpleNamespace(device_props=SimpleNamespace(type="cpu")), 1) == [1]
    assert timed(SimpleNamespace(device_props=SimpleNamespace(type="cuda")), 2) == ["pool", 2]
    assert entered == ["pool", "left"]
