"""Measure the rates of this machine's GPU that limit a training step: products, attention, memory, launches and the bus.

    python -m benchmarks.gpu_rates [--output FILE]

Kernels are timed as replays of a CUDA graph, so that launches do not count. The shapes are those of SDXL and FLUX at
1024 x 1024.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import results
from benchmarks.worker import describe_device

OUTPUT = results.FOLDER / "gpu_rates.json"

#: Rows, inner and outer size of products: SDXL's and FLUX's linear layers, and a large square.
PRODUCTS = (
    *((4096, 640, 640), (4096, 640, 5120), (4096, 2560, 640), (1024, 1280, 1280), (1024, 1280, 10240), (1024, 5120, 1280)),
    *((4608, 3072, 3072), (4608, 3072, 12288), (4608, 12288, 3072), (4608, 3072, 21504), (8192, 8192, 8192)),
)

#: Batch, heads, queries, keys, head size: SDXL's self- and cross-attention, FLUX's attention.
ATTENTION = ((1, 10, 4096, 4096, 64), (1, 20, 1024, 1024, 64), (1, 10, 4096, 77, 64), (1, 24, 4608, 4608, 128))

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}

REPEATS = 10


def seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
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
    samples = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / repeats)
    return float(median(samples[2:]))


def products() -> Iterator[dict[str, Any]]:
    """Yield seconds of products by type; int8 and fp8 products include no quantization."""
    for shape in PRODUCTS:
        for kind, work in _products(*shape).items():
            row: dict[str, Any] = {"shape": list(shape), "type": kind}
            try:
                row["seconds"] = seconds(work)
                row["tera_per_second"] = round(2e-12 * math.prod(shape) / row["seconds"], 1)
            except RuntimeError as error:
                row["failed"] = str(error).splitlines()[0]
            yield row


def _products(rows: int, inner: int, outer: int) -> dict[str, Callable[[], Any]]:
    a, b = torch.randn(rows, inner, device="cuda"), torch.randn(outer, inner, device="cuda")

    def pair(kind: torch.dtype, scale: float = 1) -> tuple[torch.Tensor, torch.Tensor]:
        return (a * scale).clamp(-127, 127).to(kind), (b * scale).clamp(-127, 127).to(kind).t()

    bf16, fp16, int8, fp8 = pair(torch.bfloat16), pair(torch.float16), pair(torch.int8, 30), pair(torch.float8_e4m3fn)
    scale = torch.ones((), device="cuda")
    by_row, by_column = torch.ones(rows, 1, device="cuda"), torch.ones(1, outer, device="cuda")
    return {
        "bf16": lambda: torch.mm(*bf16),
        "fp16": lambda: torch.mm(*fp16),
        "int8": lambda: torch._int_mm(*int8),
        "fp8": lambda: torch._scaled_mm(*fp8, scale, scale, out_dtype=torch.bfloat16),
        "fp8_rows": lambda: torch._scaled_mm(*fp8, by_row, by_column, out_dtype=torch.bfloat16),
    }


def attention() -> Iterator[dict[str, Any]]:
    """Yield seconds of attention's passes by kernel."""
    for shape in ATTENTION:
        for name, kernel in KERNELS.items():
            forward, both = _attention(kernel, *shape)
            row: dict[str, Any] = {"shape": list(shape), "kernel": name}
            try:
                row |= {"forward": seconds(forward), "forward_and_backward": seconds(both)}
            except RuntimeError as error:
                row["failed"] = str(error).splitlines()[0]
            yield row


def _attention(
    kernel: SDPBackend, batch: int, heads: int, queries: int, keys: int, size: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def tensor(count: int) -> torch.Tensor:
        return torch.randn(batch, heads, count, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v, gradient = tensor(queries), tensor(keys), tensor(keys), tensor(queries).detach()

    def forward() -> torch.Tensor:
        with sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return forward, lambda: torch.autograd.grad(forward(), (q, k, v), gradient)


def memory() -> Iterator[dict[str, Any]]:
    """Yield seconds and bytes per second, read and written, of a bf16 addition by size."""
    for power in range(12, 30, 2):
        a, b = (torch.randn(2**power, device="cuda").to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        taken = seconds(functools.partial(torch.add, a, b, out=out))
        yield {"elements": 2**power, "seconds": taken, "giga_per_second": round(6e-9 * 2**power / taken, 1)}


def launches() -> dict[str, float]:
    """Return the host's microseconds for an operation on a few numbers: alone, with its backward pass, and a wait."""
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

    works = {"add_": plain, "mul_forward_and_backward": with_graph, "wait": waits}
    return {name: _host_microseconds(work) for name, work in works.items()}


def _host_microseconds(work: Callable[[], None]) -> float:
    samples = []
    for _ in range(8):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        samples.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
    return round(median(samples[2:]), 3)


def bus() -> dict[str, float]:
    """Return bytes per second between host and GPU in GB, for pinned and pageable memory."""
    rates = {}
    size = 2**28
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    pageable = torch.ones(size, dtype=torch.uint8)
    for name, host in (("pinned", pageable.pin_memory()), ("pageable", pageable)):
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


def main() -> int:
    """Measure everything and write the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    document = {
        "machine": describe_device(),
        "torch": torch.__version__,
        "launches_microseconds": launches(),
        "bus_giga_per_second": bus(),
        "memory": list(memory()),
        "products": list(products()),
        "attention": list(attention()),
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
