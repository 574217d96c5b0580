"""Measure the rates of this machine's GPU that limit a training step: products, attention, memory, launches and the bus.

    python -m benchmarks.gpu_rates [--output FILE]

Kernels are timed as replays of a CUDA graph, so that launches do not count. The shapes are those of SDXL and FLUX at
1024 x 1024.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import results
from benchmarks.device import describe_device
from kohya_ext.gpu import rates

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


def attention() -> Iterator[dict[str, Any]]:
    """Yield seconds of attention's passes by kernel."""
    for shape in ATTENTION:
        for name, kernel in KERNELS.items():
            forward, both = _attention(kernel, *shape)
            row: dict[str, Any] = {"shape": list(shape), "kernel": name}
            try:
                row |= {"forward": rates.seconds(forward), "forward_and_backward": rates.seconds(both)}
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


def main() -> int:
    """Measure everything and write the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args()
    document = {
        "machine": describe_device(),
        "torch": torch.__version__,
        "launches_microseconds": rates.launches(),
        "bus_giga_per_second": rates.bus(),
        "memory": list(rates.memory(range(12, 30, 2))),
        "products": list(rates.products(PRODUCTS)),
        "attention": list(attention()),
    }
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
