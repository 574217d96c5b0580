"""Measure this machine's GPU and host for the predicted seconds of a step, in under a minute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from kohya_ext.estimate.gpus import FP8, INT8, SIXTEEN_BITS
from kohya_ext.gpu import rates

#: Rows, inner and outer size of the products: large linear layers of SDXL and FLUX.
_SHAPES = ((4096, 640, 5120), (4608, 3072, 3072), (4608, 3072, 12288))

#: Elements of the addition that measures the memory's bandwidth, as a power of 2: 400 MB, larger than any cache.
_ELEMENTS = 26


def measure() -> dict[str, Any]:
    """Return the rates of the current CUDA device and its host, in operations, bytes and microseconds."""
    begun = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    # Turing has no bf16 products.
    sixteen = "bf16" if properties.major >= 8 else "fp16"
    kinds = {sixteen: SIXTEEN_BITS, "int8": INT8, "fp8": FP8}
    reached: dict[str, list[float]] = {}
    for row in rates.products(_SHAPES, kinds, samples=5):
        if "failed" not in row:
            reached.setdefault(kinds[row["type"]], []).append(1e12 * row["tera_per_second"])
    (addition,) = rates.memory((_ELEMENTS,), samples=5)
    copies = rates.bus()
    return {
        "products": {kind: median(values) for kind, values in reached.items()},
        "bandwidth": 1e9 * addition["giga_per_second"],
        "bus": 1e9 * min(copies["pinned_to_gpu"], copies["pinned_to_host"]),
        "launch_microseconds": rates.launches()["mul_forward_and_backward"],
        "cache": getattr(properties, "L2_cache_size", 4_000_000),
        "memory": properties.total_memory,
        "architecture": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "day": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - begun, 1),
    }


def lines(measured: Mapping[str, Any]) -> list[str]:
    """Return the measured rates for the console."""
    products = ", ".join(f"{rate / 1e12:.0f} T/s in {kind}" for kind, rate in measured["products"].items())
    return [
        f"Matrix products: {products}.",
        f"Memory: {measured['bandwidth'] / 1e9:.0f} GB/s. Bus: {measured['bus'] / 1e9:.1f} GB/s.",
        f"Launch of a kernel with autograd: {measured['launch_microseconds']:.1f} microseconds of the host.",
    ]
