"""The estimate knows what operators allocate on CUDA while they run, and whether before or after their results."""

from torch._subclasses.fake_tensor import FakeTensorMode

from kohya_ext.estimate.tracker import Tracker
from tests.cuda import operator_memory


def logged() -> dict[str, list[list[object]]]:
    """Return the large allocations of each case as the estimate logs them, and whether they are results."""
    rows = {}
    with FakeTensorMode(), Tracker() as tracker:
        for name, call in operator_memory.cases():
            start = len(tracker.events)
            result = call()
            events = tracker.events[start:]
            freed = {event.storage for event in events if event.bytes < 0}
            large = [event for event in events if event.bytes >= operator_memory.LEAST]
            rows[name] = [[event.bytes, event.storage not in freed] for event in large]
            del result
    return rows


def test_allocations_of_operators_are_those_of_the_allocator(printed_on_gpu):
    real = printed_on_gpu("operator_memory.py")
    assert any(not kept for row in real.values() for _, kept in row)
    assert {name: row for name, row in logged().items() if row != real[name]} == {}
