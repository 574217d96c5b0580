"""Run a training command on a real GPU and write its seconds, kernels, losses and memory as JSON.

    python -m benchmarks.gpu_worker SPECIFICATION arguments of kohya_ext...

The specification is JSON: ``result`` (the file to write), ``deterministic`` (use kernels that give the same bits in each run),
``ends`` (end the run after these steps), and the numbers of steps: ``first`` are not measured, ``measured`` are timed, and
``profiled`` run under PyTorch's profiler afterwards.
"""

from __future__ import annotations

import json
import re
import runpy
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import describe_device
from benchmarks.full_size_worker import skip_checkpoint_hashes

#: The kernels that the result lists, those with the most time first.
KERNELS = 40


def main() -> None:
    """Run the command and write the result, also after an error."""
    specification = json.loads(sys.argv[1])
    sys.argv = ["kohya_ext", *sys.argv[2:]]
    if specification["deterministic"]:
        torch.use_deterministic_algorithms(True)
        # cuDNN's attention, which PyTorch prefers on an H100, is not deterministic. Flash attention is, without warn_only.
        torch.backends.cuda.enable_cudnn_sdp(False)
    skip_checkpoint_hashes()
    steps = Steps(specification["first"], specification["measured"], specification["profiled"], specification["ends"])
    begun = time.perf_counter()
    try:
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)
    finally:
        result = steps.result() | {"device": describe_device(), "whole_run": round(time.perf_counter() - begun, 1)}
        Path(specification["result"]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


class Steps:
    """Measures a run by its backward passes, one for each step."""

    def __init__(self, first: int, measured: int, profiled: int, ends: bool) -> None:
        self.first, self.measured, self.profiled, self.ends = first, measured, profiled, ends
        self.number = 0
        self.marks: list[float] = []
        self.losses: list[torch.Tensor] = []
        self.values: dict[str, Any] = {}
        self.profiler: Any = None
        self.begun = time.perf_counter()
        backward = torch.Tensor.backward

        def count(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1:  # a loss; recording a CUDA graph begins backward passes elsewhere
                self.before(tensor)
            return backward(tensor, *args, **kwargs)

        torch.Tensor.backward = count

    def before(self, loss: torch.Tensor) -> None:
        """Measure at the beginning of a backward pass."""
        done, self.number = self.number, self.number + 1
        self.losses.append(loss.detach().clone())
        last = self.first + self.measured
        if done == 0:
            self.values["until_first_backward"] = round(time.perf_counter() - self.begun, 2)
            self.values["before"] = self.memory()
        if done in (self.first, last):
            torch.cuda.synchronize()
        if self.first <= done <= last:
            self.marks.append(time.perf_counter())
        if done == self.first:
            self.values["until_measured"] = round(time.perf_counter() - self.begun, 2)
        if done == last:
            self.values |= self.memory()
            if self.profiled:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()
        if done == last + self.profiled and self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.stop()
            try:
                self.values["profile"] = profile(self.profiler, self.profiled)
            except Exception as error:
                self.values["profile"] = {"error": repr(error)}
            self.profiler = None
        if self.ends and done > last + self.profiled:
            sys.exit(0)

    @staticmethod
    def memory() -> dict[str, Any]:
        """Return the peaks so far, and the bytes outside the allocator: the driver's, of CUDA's context and of its modules."""
        free, total = torch.cuda.mem_get_info()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "outside_the_allocator": total - free - torch.cuda.memory_reserved(),
        }

    def result(self) -> dict[str, Any]:
        """Return what was measured; ``seconds`` is the median of a step."""
        seconds = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        values = {**self.values, "steps": [round(each, 5) for each in seconds]}
        if seconds:
            values["seconds"] = round(statistics.median(seconds), 5)
        return values | {"losses": [float(loss) for loss in self.losses]}


def profile(profiler: Any, steps: int) -> dict[str, Any]:
    """Return the seconds of a step in which the GPU is busy, its kernels by name, and the calls of the host."""
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    calls: dict[str, int] = defaultdict(int)
    spans = []
    for event in profiler.profiler.kineto_results.events():
        name, nanoseconds = event.name(), event.duration_ns()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            kernel = kernels[re.sub(r"\s+", " ", name)[:160]]
            kernel[0] += 1
            kernel[1] += nanoseconds
            spans.append((event.start_ns(), event.start_ns() + nanoseconds))
        elif name.startswith("cu"):
            calls[name] += 1
    busy = end = 0
    for begin, finish in sorted(spans):
        busy += max(finish - max(begin, end), 0)
        end = max(end, finish)
    most = sorted(kernels.items(), key=lambda item: -item[1][1])
    return {
        "busy_seconds": round(busy / steps / 1e9, 6),
        "kernel_seconds": round(sum(time for _, (_, time) in most) / steps / 1e9, 6),
        "kernels": round(sum(count for _, (count, _) in most) / steps, 1),
        "calls": {name: round(count / steps, 1) for name, count in sorted(calls.items(), key=lambda item: -item[1])},
        "by_kernel": [[name, round(count / steps, 1), round(time / steps / 1e3, 1)] for name, (count, time) in most[:KERNELS]],
    }


if __name__ == "__main__":
    main()
