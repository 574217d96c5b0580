"""Run a training command up to its first backward pass, and write the peak of the process's own host memory as JSON.

    python -m benchmarks.host_memory_worker RESULT arguments of kohya_ext...

A thread samples them.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks import full_size_worker

#: Seconds between two samples.
_INTERVAL = 0.01


def main() -> None:
    """Run the command and write the result, also after an error."""
    result = Path(sys.argv[1])
    sys.argv = ["kohya_ext", *sys.argv[2:]]
    full_size_worker.skip_checkpoint_hashes()
    begun, samples, ended = own_bytes(), [], threading.Event()

    def sample() -> None:
        while not ended.wait(_INTERVAL):
            samples.append(own_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    steps: list[int] = []

    def end(self: Any, *args: Any, **kwargs: Any) -> None:
        steps.append(own_bytes())
        raise SystemExit

    torch.Tensor.backward = end
    thread.start()
    try:
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)
    finally:
        ended.set()
        thread.join()
        result.write_text(json.dumps({"begun": begun, "peak": max(samples), "steps": steps}), encoding="utf-8")


def own_bytes() -> int:
    """Return the bytes of this process's pages that belong to no file."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kilobytes,) = re.findall(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kilobytes) * 1024


if __name__ == "__main__":
    main()
