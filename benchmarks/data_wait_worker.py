"""Run a training command whose steps take a given time, and write the memory of the data loader's workers as JSON.

    python -m benchmarks.data_wait_worker RESULT STEPS SECONDS arguments of kohya_ext...

Each backward pass of a loss sleeps until ``SECONDS`` after the one before. The run ends after ``STEPS`` of them.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import caching_worker


def main() -> None:
    """Run the command and write the result, also after an error."""
    result, steps, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    sys.argv = ["kohya_ext", *sys.argv[4:]]
    caching_worker.prepare()
    backward = torch.Tensor.backward
    count, last = 0, 0.0
    measured: dict[str, Any] = {}

    def paced(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count, last
        if args:  # the passes that --cuda_graphs records have a gradient, a loss has none
            return backward(self, *args, **kwargs)
        done = backward(self, *args, **kwargs)
        count += 1
        if count == steps * 3 // 4:  # during an epoch, in which workers are alive
            own = psutil.Process()
            measured["workers_unique_bytes"] = [child.memory_full_info().uss for child in own.children() if child.is_running()]
            measured["process_unique_bytes"] = own.memory_full_info().uss
        if count > steps:
            raise SystemExit
        time.sleep(max(0.0, last + seconds - time.perf_counter()))
        last = time.perf_counter()
        return done

    torch.Tensor.backward = paced
    try:
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)
    finally:
        result.write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
