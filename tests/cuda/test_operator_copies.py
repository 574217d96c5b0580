"""The estimate knows which operators copy their inputs on CUDA, and whether before or after they allocate their results."""

import json
import subprocess
import sys
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from kohya_ext.estimate.tracker import Tracker
from tests.cuda import operator_copies

ROOT = Path(__file__).parents[2]


def logged() -> dict[str, list[list[object]]]:
    """Return the large allocations of each case as the estimate logs them, and whether they are results."""
    rows = {}
    with FakeTensorMode(), Tracker() as tracker:
        for name, call in operator_copies.cases():
            start = len(tracker.events)
            result = call()
            events = tracker.events[start:]
            freed = {event.storage for event in events if event.bytes < 0}
            large = [event for event in events if event.bytes >= operator_copies.LEAST]
            rows[name] = [[event.bytes, event.storage not in freed] for event in large]
            del result
    return rows


def test_copies_of_inputs_are_those_of_the_allocator(gpu_environment):
    script = Path(__file__).with_name("operator_copies.py")
    environ = {**gpu_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout.splitlines()[-1])
    assert any(not kept for row in real.values() for _, kept in row)
    assert {name: row for name, row in logged().items() if row != real[name]} == {}
