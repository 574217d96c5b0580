"""Measure a GPU's rates, and what its host needs for a launch.

Kernels are timed as replays of a CUDA graph, so that launches do not count. `calibrate` and benchmarks/gpu_rates.py use this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch

REPEATS = 10


def seconds(work: Callable[[], Any], repeats: int = REPEATS, samples: int = 10) -> float:
    """Return the median seconds of work on the GPU, as part of a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    taken = []
    for _ in range(samples + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / repeats)
    return float(median(taken[2:]))


#: Types of products that :func:`products` measures.
TYPES = ("bf16", "fp16", "fp32", "int8", "fp8", "fp8_rows")


def products(
    shapes: Iterable[tuple[int, int, int]], types: Iterable[str] = TYPES, samples: int = 10
) -> Iterator[dict[str, Any]]:
    """Yield ``seconds`` and ``tera_per_second`` of products by ``shape`` (rows, inner and outer size) and ``type``.

    int8 and fp8 products include no quantization. A type that the GPU lacks has ``failed`` instead, with the reason.
    """
    for rows, inner, outer in shapes:
        for kind in types:
            row: dict[str, Any] = {"shape": [rows, inner, outer], "type": kind}
            try:
                row["seconds"] = seconds(_product(kind, rows, inner, outer), samples=samples)
                row["tera_per_second"] = round(2e-12 * rows * inner * outer / max(row["seconds"], 1e-9), 1)
            except (RuntimeError, AttributeError, ValueError) as error:
                row["failed"] = str(error).splitlines()[0]
            yield row


def _product(kind: str, rows: int, inner: int, outer: int) -> Callable[[], Any]:
    a, b = torch.randn(rows, inner, device="cuda"), torch.randn(outer, inner, device="cuda")
    if kind == "int8":
        a8, b8 = ((value * 30).clamp(-127, 127).to(torch.int8) for value in (a, b))
        return lambda: torch._int_mm(a8, b8.t())
    if kind in ("fp8", "fp8_rows"):
        by_row = (rows, 1) if kind == "fp8_rows" else ()
        by_column = (1, outer) if kind == "fp8_rows" else ()
        scales = torch.ones(by_row, device="cuda"), torch.ones(by_column, device="cuda")
        af, bf = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return lambda: torch._scaled_mm(af, bf.t(), *scales, out_dtype=torch.bfloat16)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
    x, y = a.to(dtype), b.to(dtype)
    return lambda: x @ y.t()


def memory(powers: Iterable[int], samples: int = 10) -> Iterator[dict[str, Any]]:
    """Yield seconds and bytes per second, read and written, of a bf16 addition of ``2**power`` elements."""
    for power in powers:
        a, b = (torch.randn(2**power, device="cuda").to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        taken = seconds(partial(torch.add, a, b, out=out), samples=samples)
        yield {"elements": 2**power, "seconds": taken, "giga_per_second": round(6e-9 * 2**power / max(taken, 1e-9), 1)}


def launches() -> dict[str, float]:
    """Return the host's microseconds for an operation on a few numbers, and for a wait.

    In ``mul_forward_and_backward`` a product and its backward pass count as two operations.
    """
    x = torch.zeros(8, device="cuda")
    weight = torch.ones(8, device="cuda", requires_grad=True)

    def plain() -> None:
        for _ in range(1000):
            x.add_(1)

    def with_graph() -> None:
        y = x
        for _ in range(500):
            y = y * weight
        y.sum().backward()

    def waits() -> None:
        for _ in range(1000):
            torch.cuda.synchronize()

    measured = (("add_", plain), ("mul_forward_and_backward", with_graph), ("wait", waits))
    return {name: _microseconds_of_one(work) for name, work in measured}


def _microseconds_of_one(work: Callable[[], None]) -> float:
    """Return the host's microseconds for one of 1000 operations."""
    samples = []
    for _ in range(8):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        samples.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
    return round(median(samples[2:]), 3)


def bus(size: int = 2**28) -> dict[str, float]:
    """Return bytes per second between host and GPU in GB, for pinned and pageable memory."""
    rates = {}
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    pinned, pageable = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.ones(size, dtype=torch.uint8)
    for name, host in (("pinned", pinned), ("pageable", pageable)):
        for direction, (to, source) in {"to_gpu": (device, host), "to_host": (host, device)}.items():
            samples = []
            for _ in range(5):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                to.copy_(source)
                torch.cuda.synchronize()
                samples.append(time.perf_counter() - begun)
            rates[f"{name}_{direction}"] = round(size / median(samples) / 1e9, 2)
    return rates
