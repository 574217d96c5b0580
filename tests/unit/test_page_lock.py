"""Page-locked memory: its limit, and a machine that refuses it."""

import gc
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patching import page_lock  # noqa: E402
from kohya_ext.patching.page_lock import PageLock  # noqa: E402

MIB = 2**20


@pytest.fixture
def runtime(monkeypatch):
    """CUDA's functions, with the addresses that are locked and the code that locking returns."""
    cuda = SimpleNamespace(locked={}, code=0)

    def register(address, size, flags):
        if cuda.code == 0:
            cuda.locked[address] = size
        return cuda.code

    cuda.cudaHostRegister, cuda.cudaHostUnregister = register, cuda.locked.pop
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    return cuda


def test_memory_is_locked_up_to_the_limit_and_unlocked_with_the_lock(runtime):
    lock, memory = PageLock(3 * MIB), [torch.empty(MIB, dtype=torch.uint8) for _ in range(4)]
    for each in memory:
        lock.lock(each)
    assert [each.data_ptr() in runtime.locked for each in memory] == [True, True, True, False]
    assert lock.locked == sum(runtime.locked.values()) == 3 * MIB
    del lock
    gc.collect()
    assert runtime.locked == {}


def test_after_a_refusal_nothing_is_locked_and_the_error_is_forgotten(runtime, monkeypatch):
    forgotten = []
    monkeypatch.setattr(page_lock, "_forget_error", lambda: forgotten.append(True))
    lock, memory = PageLock(3 * MIB), torch.empty(MIB, dtype=torch.uint8)
    runtime.code = 2
    lock.lock(memory)
    runtime.code = 0
    lock.lock(memory)
    assert (lock.locked, runtime.locked, forgotten) == (0, {}, [True])


def test_memory_that_the_machine_needs_is_not_locked(runtime, monkeypatch):
    monkeypatch.setattr(page_lock, "free_memory", lambda: MIB - 1)
    lock = PageLock(3 * MIB)
    lock.lock(torch.empty(MIB, dtype=torch.uint8))
    assert (lock.locked, runtime.locked) == (0, {})


def test_a_build_without_cuda_locks_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: None)
    lock = PageLock(MIB)
    lock.lock(torch.empty(MIB, dtype=torch.uint8))
    assert lock.locked == 0
