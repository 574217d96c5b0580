"""Compilations that are ended from another thread."""

import sys
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from kohya_ext.compiling import deadline
from kohya_ext.compiling.deadline import call_until


class TooLongError(Exception):
    pass


def wait(seconds=60.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.005)
    return "done"


def waiting_until(condition):
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_function_that_is_in_time_is_not_disturbed(monkeypatch):
    """Also its thread is not: an error of none stays announced in Python 3.11, where a profiler then waits forever."""
    ended = []
    monkeypatch.setattr(deadline, "_send", lambda *args: ended.append(args))
    assert call_until(0.2, TooLongError, lambda: ended.append(1), lambda: wait(0.01)) == "done"
    assert wait(0.3) == "done"
    assert not ended


def test_function_that_takes_too_long_is_ended():
    ended, begun = [], time.monotonic()
    with pytest.raises(TooLongError):
        call_until(0.05, TooLongError, lambda: ended.append(1), wait)
    assert ended == [1]
    assert time.monotonic() - begun < 30
    assert wait(0.1) == "done", "nothing is raised later"


def test_function_that_catches_errors_is_ended_nevertheless(monkeypatch):
    monkeypatch.setattr(deadline, "INTERVAL", 0.05)
    caught = []

    def function():
        while len(caught) < 3:
            try:
                wait()
            except TooLongError:
                caught.append(1)
        wait()

    with pytest.raises(TooLongError):
        call_until(0.05, TooLongError, lambda: None, function)
    assert len(caught) == 3


def test_error_of_the_function_is_raised():
    with pytest.raises(ZeroDivisionError):
        call_until(10.0, TooLongError, lambda: None, lambda: 1 / 0)


def test_wait_for_a_process_ends(monkeypatch):
    """A future of a process that compiles, which only its pool can end."""
    future, killed = Future(), []

    def shutdown():
        assert waiting_until(lambda: killed), "the process is killed while its pool waits for it"
        future.set_exception(RuntimeError("SubprocPool closed"))

    pool = SimpleNamespace(process=SimpleNamespace(kill=lambda: killed.append(1)))
    compiler = SimpleNamespace(_pool_set={id(pool): pool}.values(), shutdown_compile_workers=shutdown)
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", compiler)
    monkeypatch.setattr(deadline, "_PATIENCE", 0.01)
    with pytest.raises((TooLongError, RuntimeError)):
        call_until(0.05, TooLongError, lambda: None, future.result)
    assert killed


@pytest.mark.thorough
@pytest.mark.linux("PyTorch compiles in one process on Windows")
def test_inductor_waits_no_longer_for_its_processes():
    config = pytest.importorskip("torch._inductor.config")
    from torch._inductor.async_compile import AsyncCompile

    with config.patch(compile_threads=2):
        pool = AsyncCompile.process_pool()
        assert pool.submit(abs, -1).result(120) == 1
        begun = time.monotonic()
        with pytest.raises((TooLongError, RuntimeError)):
            call_until(0.5, TooLongError, lambda: None, pool.submit(time.sleep, 600).result)
        assert time.monotonic() - begun < 60
        assert AsyncCompile.process_pool() is not pool, "a later compilation has processes again"
        deadline.end_compile_workers()
