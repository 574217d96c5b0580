"""The estimate knows what operators allocate on CUDA while they run, and whether before or after their results."""

from torch._subclasses.fake_tensor import FakeTensorMode

from kohya_ext.dry_run import cuda_operators
from kohya_ext.dry_run.tracker import Tracker
from tests.cuda import operator_memory


def logged() -> dict[str, list[object]]:
    """Return each case's large allocations as the estimate logs them, whether they are results, and the results' strides."""
    rows = {}
    with cuda_operators.functions_as_on_cuda(), FakeTensorMode(), Tracker() as tracker:
        for name, call in operator_memory.cases():
            start = len(tracker.events)
            result = call()
            events = tracker.events[start:]
            freed = {event.storage for event in events if event.bytes < 0}
            large = [event for event in events if event.bytes >= operator_memory.LEAST]
            strides = [[*stride] for stride in operator_memory.strides(result)]
            rows[name] = [[[event.bytes, event.storage not in freed] for event in large], strides]
            del result
    return rows


def test_allocations_of_operators_are_those_of_the_allocator(printed_on_gpu, monkeypatch):
    monkeypatch.setattr(cuda_operators, "is_on_gpu", lambda _: True)
    real = printed_on_gpu("operator_memory.py")
    assert any(not kept for allocated, _ in real.values() for _, kept in allocated)
    assert {name: (row, real[name]) for name, row in logged().items() if row != real[name]} == {}
