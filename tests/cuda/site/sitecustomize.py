"""Shrink the models and record what every step of a real script costs on the virtual GPU. Python runs this at startup.

A step extends from one ``Accelerator.accumulate`` to the next, so the last one of a run is not recorded. The environment
variable SPY_FILE names the record. With SPY_NOT_FINITE_AT, the numbers that the host reads in that step are NaN. With
SPY_INTEGERS, the integers that it reads have this value. TRIAL_CHOOSES names the features that the trial of --speed finds
fastest, separated by commas; TRIAL_HAS_TIME only gives it time. With TUNE_WITHOUT_SEARCH, `tune` measures no other
configurations.
"""

import atexit
import collections
import contextlib
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import wrapt

import virtual_gpu
from kohya_ext.tiny import shrink
from virtual_gpu import integers

shrink.install()
NOT_FINITE = int(os.environ.get("SPY_NOT_FINITE_AT", 0))
INTEGERS = int(os.environ.get("SPY_INTEGERS", 0))

#: The step whose calls are traced: the second one, because the first also sets up what later steps reuse.
TRACED = 2

COUNTERS = ("launches", "launches_in_graphs", "syncs", "bytes_to_device", "bytes_to_host")

ROOT = str(Path(shrink.__file__).parents[2]) + os.sep

steps = []
reached = set()
syncs = collections.Counter()
last = {}
begun = 0.0


def counters():
    import torch

    now = virtual_gpu.counters()
    counted = {name: now[name] for name in COUNTERS}
    # "allocated" would include up to 1 MiB of each cached block that a tensor does not fill.
    return {**counted, "bytes": torch.cuda.memory_stats()["requested_bytes.all.current"]}


def begin_step():
    global begun
    import torch

    now = counters()
    if last:
        counted = {name: now[name] - last[name] for name in COUNTERS}
        random_state = bytes(torch.cuda.get_rng_state()).hex()
        seconds = time.perf_counter() - begun
        steps.append(
            {**counted, "seconds": seconds, "bytes": now["bytes"], "random_state": random_state, "sync_places": dict(syncs)}
        )
    last.update(now)
    syncs.clear()
    number = len(steps) + 1
    virtual_gpu.set_finite(number != NOT_FINITE)
    trace = record_call if number == TRACED else None
    sys.setprofile(trace)
    threading.setprofile(trace)
    if number == 1:
        # PyTorch warns at each synchronization, with the line of Python that caused it.
        torch.cuda.set_sync_debug_mode("warn")
        warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
        warnings.showwarning = count_place
    begun = time.perf_counter()


def count_place(message, category, filename, lineno, file=None, line=None):
    """Count a line by its path in this repository, or else by its folder and file."""
    is_own = filename.startswith(ROOT)
    syncs[f"{filename.removeprefix(ROOT) if is_own else '/'.join(Path(filename).parts[-2:])}:{lineno}"] += 1


def record_call(frame, event, argument):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(ROOT):
        reached.add(file.removeprefix(ROOT).removeprefix("patches/").removesuffix(".py"))


@wrapt.when_imported("accelerate.accelerator")
def measure(module):
    if INTEGERS:
        integers.assume(INTEGERS)
    original = module.Accelerator.accumulate

    @contextlib.contextmanager
    def accumulate(self, *models):
        begin_step()
        with original(self, *models):
            yield

    module.Accelerator.accumulate = accumulate


@atexit.register
def write():
    import torch

    if not steps:
        return
    record = {
        "steps": steps,
        "peak": torch.cuda.memory_stats()["requested_bytes.all.peak"],
        "reached": sorted(reached),
        "unknown_calls": virtual_gpu.counters()["unknown_calls"],
    }
    Path(os.environ["SPY_FILE"]).write_text(json.dumps(record))


@wrapt.when_imported("kohya_ext.planning.alternatives")
def leave_out_search(module):
    """Let `tune` measure no other configurations, whose estimates take most of its time."""
    if "TUNE_WITHOUT_SEARCH" in os.environ:
        module.Search.run = lambda self: []


@wrapt.when_imported("kohya_ext.speed.trial")
def decide_trial(module):
    """Give the trial of a short run time, and choose by name where kernels take none."""
    if "TRIAL_CHOOSES" not in os.environ and "TRIAL_HAS_TIME" not in os.environ:
        return
    module.MOST_SECONDS = module.SHARE = 1e9
    module.LEAST_SECONDS_OF_COMPILING = 1e99
    if "TRIAL_CHOOSES" in os.environ:
        chosen = tuple(name for name in os.environ["TRIAL_CHOOSES"].split(",") if name)
        module.choose = lambda candidates: next(each for each in candidates if each.features == chosen)
