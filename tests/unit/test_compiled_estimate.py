"""The log of compiled code on fake tensors: inductor's decisions for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _triton

from kohya_ext.config.command_line import CommandLine
from kohya_ext.dry_run import autotuning, estimation, inductor_gpu
from kohya_ext.dry_run.allocator import CachingAllocator
from kohya_ext.dry_run.events import RELEASE, Event, Kind
from kohya_ext.dry_run.inductor import BACKEND, logging_to, traceable
from kohya_ext.dry_run.tracker import Tracker
from kohya_ext.errors import UserError
from kohya_ext.tiny import environment

ROWS, WIDTH = 64, 256


def logged(function: Callable[[Any], Any]) -> list[Event]:
    """Compile a function of a bf16 tensor in a first call, and return the events of a second one."""
    return logs(function)[1]


def logs(function: Callable[[Any], Any]) -> tuple[list[Event], list[Event]]:
    """Return the events of two calls of a function of a bf16 tensor. The first one compiles it."""
    mode, tracker = traceable(), Tracker()
    with mode, logging_to(tracker):
        given = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(function, backend=BACKEND)
        compiled(given)
        first = [*tracker.events]
        with tracker:
            result = compiled(given)
        events = [*tracker.events[len(first) :]]
        del result
    return first, events


def rotated(given: Any) -> Any:
    """Return the halves exchanged, as rotary position embeddings do, in float32."""
    first, second = given.chunk(2, dim=-1)
    return torch.cat((-second, first * 2), dim=-1).float()


def test_a_concatenation_is_fused_with_its_reader() -> None:
    """As in the code that inductor generates for a GPU. For a CPU it keeps the concatenation in memory."""
    pytest.importorskip("triton")
    assert [event.bytes for event in logged(rotated)] == [4 * ROWS * WIDTH]


def updated(given: Any) -> Any:
    """Return numbers that are written where the matrix product was."""
    return (given @ given.t()) * 2 + 1


@pytest.mark.parametrize(("function", "copies"), [(rotated, 0), (updated, 1)])
def test_a_kernel_is_timed_when_it_first_runs(function: Callable[[Any], Any], copies: int) -> None:
    """As inductor does: next to copies of what it writes in place, and in memory that is returned to the driver."""
    pytest.importorskip("triton")
    first, later = logs(function)
    timings = [event for event in first if event.pool == autotuning.POOL]
    flushed = inductor_gpu.CACHE, autotuning._ANY_CACHE  # the latter by PyTorch 2.6
    flushes = [event for event in timings if event.bytes in flushed]
    copied = [event for event in timings if event.bytes == 2 * ROWS * ROWS]
    assert len(flushes) >= 2, "a kernel without a choice is not timed"
    assert len(copied) == 2 * len(flushes) * copies, "before the flush, which is next to a second copy"
    assert [event.phase for event in timings].count(RELEASE) == 1
    allocator = CachingAllocator()
    allocator.replay(first)
    with_timings = allocator.most_reserved
    assert with_timings >= inductor_gpu.CACHE
    allocator.release_unused()
    assert allocator.reserved < inductor_gpu.CACHE, "of the pool nothing is left"
    assert not [event for event in later if event.pool == autotuning.POOL]


def test_copies_of_a_backward_pass_that_exceed_the_peak_are_on_the_host() -> None:
    """``copy_args_to_cpu_if_needed`` of inductor's autotuner."""

    class Kernel:
        fn = type("Function", (), {"arg_names": ["in_out_ptr0", "in_ptr0", "xnumel"]})
        mutated_arg_names = ("in_out_ptr0",)
        optimize_mem = True

    tensor = torch.empty(1024, dtype=torch.bfloat16)
    events = [Event(0, 3000, "backward"), Event(1, 4096, "backward"), Event(1, -4096, "backward")]
    assert autotuning._copies(Kernel, (tensor, tensor, 1024), events) == [2048]
    assert autotuning._copies(Kernel, (tensor, tensor, 1024), events[:1]) == []
    Kernel.optimize_mem = False
    assert autotuning._copies(Kernel, (tensor, tensor, 1024), events[:1]) == [2048]


#: A block, not compiled and compiled: FLOPs, and the matrices of 256 x 256 that the backward pass allocates. The forward pass
#: has the same, and neither takes one.
COMPILED = """
import json
from torch._dynamo.backends.registry import lookup_backend
from kohya_ext.compiling import graph_breaks
from kohya_ext.dry_run import compiling, cuda_functions, device
from kohya_ext.dry_run.gpu_tracker import GpuTracker
from kohya_ext.dry_run.inductor import BACKEND, traceable
import torch

def block(x, weight):
    return ((x.sin() @ weight).cos() @ weight.t()).sin()

def breaking():
    def function(x):
        torch._dynamo.graph_break()
        return x + 1
    return function, (torch.zeros(1),)

tracker = GpuTracker()
compiling.prepare()
device.install()
cuda_functions.install(tracker.release_unused)
mode = tracker.values.mode = traceable()
counts = []
with mode, tracker, compiling.compiled_blocks(tracker):
    breaks = graph_breaks.breaks_the_graph(breaking), graph_breaks.breaks_the_graph(lambda: (abs, (torch.zeros(1),)))
    weight = torch.zeros(128, 256, device="cuda", requires_grad=True)
    for run in (block, torch.compile(block, backend=lookup_backend(BACKEND))):
        for _ in range(2):
            before = tracker.flops
            start = len(tracker.events)
            x = torch.zeros(256, 128, device="cuda", requires_grad=True)
            with tracker.during("forward"):
                loss = run(x, weight).sum()
            with tracker.during("backward"):
                loss.backward()
        allocated = [event.phase for event in tracker.events[start:] if event.bytes == 4 * 256**2]
        counts.append((tracker.flops - before, allocated.count("backward")))
    table = torch.zeros(192, 192)
    turned = torch.compile(lambda x, tables: x * tables[0].to(x.device), backend=lookup_backend(BACKEND))
    start = len(tracker.events)
    kept = turned(torch.zeros(192, 192, device="cuda", requires_grad=True), (table,))
    copies = len([event for event in tracker.events[start:] if event.bytes == 4 * 192**2])
print(json.dumps([breaks, counts, copies - 1, [str(each.device) for each in (table, kept)]]))
"""


def test_a_backward_pass_allocates_on_the_gpu_and_probes_trace() -> None:
    """Both are those of a run: else FLOPs and tensors would be missing, or the patch against graph breaks."""
    pytest.importorskip("triton")
    variables = {**os.environ, "PYTHONPATH": environment.python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILED], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    breaks, ((eager, _), (compiled, allocated)), copies, devices = json.loads(done.stdout)
    assert breaks == [True, False]
    assert compiled == eager == 6 * 2 * 256 * 256 * 128
    assert allocated == 1
    assert copies == 2, "the input, and the host's table, which the block copies to the GPU and keeps"
    assert devices == ["cpu", "cuda:0"]


def test_a_second_size_has_a_graph_for_all_sizes() -> None:
    """Dynamo makes the size dynamic, and no third graph: each call allocates what its own size needs."""
    pytest.importorskip("triton")
    mode, tracker = traceable(), Tracker()
    sizes: list[int] = []
    counts = torch._dynamo.utils.counters["stats"]
    before = counts["unique_graphs"]
    with mode, logging_to(tracker):
        compiled = torch.compile(lambda given: (given @ given.t()) * 2 + 1, backend=BACKEND)
        for rows in (64, 32, 128):
            given = torch.zeros(rows, WIDTH)
            start = len(tracker.events)
            with tracker:
                result = compiled(given)
            allocated = [event for event in tracker.events[start:] if event.bytes > 0]
            sizes += [event.bytes for event in allocated if tracker.kinds[event.storage] is Kind.TEMPORARY]
            del result
    assert sizes == [4 * rows**2 for rows in (64, 32, 128)]
    assert counts["unique_graphs"] - before == 2


@pytest.mark.parametrize(("length", "stride"), [(24, 24), (20, 24), (16, 16)])
def test_masks_of_attention_have_aligned_rows(length: int, stride: int) -> None:
    """CUDA's memory-efficient attention reads 8 elements of a row together."""
    graph = torch.fx.Graph()
    mask = graph.placeholder("mask")
    value = mask.meta["val"] = torch.rand(2, 1, 4, length)
    graph.output(inductor_gpu._padded(mask))
    padded = torch.fx.GraphModule({}, graph)(value)
    assert torch.equal(padded, value)
    assert padded.stride() == (4 * stride, 4 * stride, stride, 1)


def test_a_block_that_cannot_be_compiled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs it eager, as in a run. Its log would be that of a run without compiled blocks."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(inductor_gpu, "move", fail)
    expected = r"compiled blocks cannot be estimated .*no such operator.*--selective_torch_compile"
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(UserError, match=expected):
        logged(rotated)


def test_an_estimate_of_compiled_blocks_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "has_triton_package", lambda: False)
    command = CommandLine(Path("sdxl_train_network.py"), ["--selective_torch_compile"], {})
    with pytest.raises(UserError, match=r"Triton is not installed; run: .* -m pip install .*triton"):
        estimation._check(command, None)
