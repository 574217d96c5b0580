"""The estimate knows what operators allocate on CUDA while they run, and whether before or after their results."""

import json
import subprocess
import sys
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from kohya_ext.estimate.tracker import Tracker
from tests.cuda import operator_memory

ROOT = Path(__file__).parents[2]


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


def test_allocations_of_operators_are_those_of_the_allocator(gpu_environment):
    script = Path(__file__).with_name("operator_memory.py")
    environ = {**gpu_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout.splitlines()[-1])
    assert any(not kept for row in real.values() for _, kept in row)
    assert {name: row for name, row in logged().items() if row != real[name]} == {}
