"""Run a training command on a virtual GPU and write its memory, launches and host time as JSON.

    python -m benchmarks.full_size_worker RESULT PASSES TOKENS ALLOCATIONS arguments of kohya_ext...

The run ends before the backward pass after ``PASSES``, so it never saves. Every integer that it reads from the GPU, a length of
a caption, is ``TOKENS``, and ``nonzero`` (a timestep in its schedule) returns one index; 0 leaves what the GPU returns. With
``ALLOCATIONS`` 1, the result also has the tensors alive at the peak, by the lines of code that allocated them.

Host memory holds no weights: casts and copies of large tensors on the host, and copies to it, return uninitialized memory,
which takes no space until it is read. The virtual GPU computes no values, so none are lost.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import sys
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import wrapt
from torch._dynamo.utils import counters

import virtual_gpu
from kohya_ext.dry_run import several_processes
from kohya_ext.estimate.memory_config import HUNYUAN_CAPTION_TOKENS
from kohya_ext.gpu import peak_memory
from virtual_gpu import integers

#: Tensors on the host with fewer elements are cast and copied as usual.
LARGE = 2**16

#: Innermost lines of code, outside torch, by which allocations are grouped.
LINES = 3


def main() -> None:
    """Run the command and write the result, also after an error."""
    result, passes, tokens, allocations = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1"
    sys.argv = ["kohya_ext", *sys.argv[5:]]
    if allocations:
        torch.cuda.memory._record_memory_history(max_entries=4_000_000, context="alloc", stacks="python")
    leave_host_memory_empty()
    leave_loaded_tensors_empty()
    skip_checkpoint_hashes()
    shorten_captions()
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        several_processes.pretend(processes)
        leave_offloaded_state_empty()
    if tokens:
        integers.assume(tokens)
    steps = end_after(passes)
    try:
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)
    finally:
        statistics = torch.cuda.memory_stats()
        allocated, reserved = peak_memory.of_device(0)
        row = {
            "allocated": allocated,
            "reserved": reserved,
            "requested": statistics.get("requested_bytes.all.peak"),
            "retries": statistics.get("num_alloc_retries"),
            "out_of_memory": statistics.get("num_ooms"),
            "steps": steps,
        }
        if (graphs := counters["stats"]["unique_graphs"]) > 0:
            row["compiled"] = {"graphs": graphs, "graph_breaks": sum(counters["graph_break"].values())}
        if allocations:
            row["at_peak"] = at_peak(torch.cuda.memory._snapshot()["device_traces"][0])
        result.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def leave_host_memory_empty() -> None:
    """Replace ``Tensor.to`` by a function that does not read large tensors on the host, and does not write them."""
    to = torch.Tensor.to

    def empty(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.numel() < LARGE or type(self) not in (torch.Tensor, torch.nn.Parameter) or self.layout is not torch.strided:
            return to(self, *args, **kwargs)
        try:
            device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        except (TypeError, RuntimeError):  # .to(other), .to(copy=True)
            return to(self, *args, **kwargs)
        device, dtype = device or self.device, dtype or self.dtype
        is_moved = device.type != self.device.type
        if "cpu" in (device.type, self.device.type) and (is_moved or dtype is not self.dtype):
            return torch.empty_like(self.detach(), dtype=dtype, device=device)
        return to(self, *args, **kwargs)

    torch.Tensor.to = empty


def leave_offloaded_state_empty() -> None:
    """Write nothing to large tensors on the host, copy and pin none, and do not step them: that would take memory."""
    zeros, full = torch.zeros, torch.full

    def create_empty(create: Any) -> Any:
        def created(*args: Any, **kwargs: Any) -> Any:
            shape = create(*args, **{**kwargs, "device": "meta"}).shape
            if math.prod(shape) < LARGE or torch.device(kwargs.get("device") or "cpu").type != "cpu":
                return create(*args, **kwargs)
            return torch.empty(shape, dtype=kwargs.get("dtype"))

        return created

    def leave(method: Any) -> Any:
        def unless_large(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_left = self.device.type == "cpu" and self.numel() >= LARGE
            return self if is_left else method(self, *args, **kwargs)

        return unless_large

    torch.zeros, torch.full = create_empty(zeros), create_empty(full)
    for name in ("copy_", "mul_", "pin_memory", "clone"):
        setattr(torch.Tensor, name, leave(getattr(torch.Tensor, name)))

    def replace(module: Any) -> None:
        module.CPUAdamBuilder.load = lambda *_, **__: types.SimpleNamespace(create_adam=_ignore, destroy_adam=_ignore)

    def leave_unstepped(module: Any) -> None:
        module.DeepSpeedCPUAdam.step = _ignore

    def load_in_this_process(module: Any) -> None:
        module.prepare_deepspeed_args = _ignore  # it asks for a data loader worker, whose fork would reserve as much memory

    wrapt.register_post_import_hook(load_in_this_process, "library.deepspeed_utils")
    wrapt.register_post_import_hook(replace, "deepspeed.ops.op_builder")

    def leave_uncompared(module: Any) -> None:
        module.assert_ints_same_as_other_ranks = _ignore

    wrapt.register_post_import_hook(leave_unstepped, "deepspeed.ops.adam.cpu_adam")
    wrapt.register_post_import_hook(leave_uncompared, "deepspeed.runtime.zero.partitioned_param_coordinator")


def _ignore(*_: Any, **__: Any) -> None:
    """Do nothing."""


def leave_loaded_tensors_empty() -> None:
    """Replace upstream's reader of Anima and HunyuanImage, which copies a file into host memory tensor by tensor."""

    def replace(module: Any) -> None:
        read = module.MemoryEfficientSafeOpen.get_tensor

        def get_tensor(self: Any, key: str, device: Any = None, dtype: Any = None) -> Any:
            entry = self.header[key]
            if math.prod(entry["shape"]) < LARGE or (device is not None and device.type != "cpu"):
                return read(self, key, device, dtype)
            return torch.empty(entry["shape"], dtype=dtype or self._get_torch_dtype(entry["dtype"]))

        module.MemoryEfficientSafeOpen.get_tensor = get_tensor

    wrapt.register_post_import_hook(replace, "library.safetensors_utils")


def skip_checkpoint_hashes() -> None:
    """Replace the hashes of checkpoints in the metadata, which would read gigabytes of zeros."""

    def replace(module: Any) -> None:
        module.calculate_sha256 = module.model_hash = lambda file: "0" * 64

    for name in ("library.model_io", "library.train_util"):
        wrapt.register_post_import_hook(replace, name)


def shorten_captions() -> None:
    """Cut HunyuanImage's captions to the length that estimates assume."""

    def replace(module: Any) -> None:
        module.TOKENIZER_MAX_LENGTH = HUNYUAN_CAPTION_TOKENS

    wrapt.register_post_import_hook(replace, "library.hunyuan_image_text_encoder")


def end_after(passes: int) -> list[dict[str, Any]]:
    """End the run before the backward pass after ``passes``; return a list that gets a row for each pass, beginning before it.

    A row has the host's seconds, the launches, the syncs and the peaks since the row before.
    """
    rows: list[dict[str, Any]] = []
    last: tuple[float, float, int, int] | None = None
    backward = torch.Tensor.backward

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if args:  # the passes that --cuda_graphs records have a gradient, a loss has none
            return backward(self, *args, **kwargs)
        now = (time.perf_counter(), time.process_time(), virtual_gpu.launches(), virtual_gpu.syncs())
        if last is not None:
            wall, processor, launched, waits = (after - before for after, before in zip(now, last, strict=True))
            allocated, reserved = peak_memory.of_device(0)
            rows.append(
                {
                    "seconds": wall,
                    "processor_seconds": processor,
                    "launches": launched,
                    "syncs": waits,
                    "allocated": allocated,
                    "reserved": reserved,
                }
            )
        if len(rows) == passes:
            raise SystemExit
        last = now
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = count
    return rows


def at_peak(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tensors alive at the peak of an allocator's trace, by size and the lines of code that allocated them."""
    alive: dict[int, dict[str, Any]] = {}
    total = peak = end = 0
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            total += event["size"]
        elif event["action"] == "free_completed" and event["addr"] in alive:
            total -= alive.pop(event["addr"])["size"]
        if total > peak:
            peak, end = total, index
    alive = {}
    for event in trace[: end + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    groups = Counter((event["size"], _lines(event["frames"])) for event in alive.values())
    rows = [{"bytes": size, "tensors": count, "lines": lines} for (size, lines), count in groups.items()]
    return sorted(rows, key=lambda row: -row["bytes"] * row["tensors"])


def _lines(frames: list[dict[str, Any]]) -> str:
    ours = [frame for frame in frames if "/torch/" not in frame["filename"] and frame["filename"] not in ("??", __file__)]
    return " < ".join(f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in (ours or frames)[:LINES])


if __name__ == "__main__":
    main()
