"""How 8-bit layers multiply on the virtual GPU, and what they launch, as JSON: with torch's scaled product, and without it.

A build of torch for Windows refuses that product.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

import virtual_gpu
from kohya_ext.patching.attributes import replaced
from kohya_ext.quantization import convolution
from kohya_ext.quantization.linear import KINDS, Products, convert
from kohya_ext.quantization.support import find_convolution_products, find_products

ROWS, INPUTS, OUTPUTS = 256, 640, 1280


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("Rowwise scaling is not currently supported on your device")


def launched(work: Callable[[], Any]) -> dict[str, int]:
    """Return the kernels that ``work`` launches the second time, and how often."""
    work()
    before = dict(virtual_gpu.counters()["kernels"])
    work()
    after = virtual_gpu.counters()["kernels"]
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def described(precision: str) -> dict[str, Any]:
    """Return how layers multiply, why not in 8 bits, and the kernels of a layer's two passes in bf16."""
    products, obstacle = find_products(torch.device("cuda", 0), KINDS[precision])
    return {"products": products, "obstacle": obstacle, "kernels": passes(precision, products)}


def passes(precision: str, products: Products) -> dict[str, int]:
    """Return the kernels of a layer's forward pass and input gradient."""
    layer = torch.nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16).requires_grad_(False)
    convert(layer, KINDS[precision], products, "cuda")
    x = torch.zeros(ROWS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.zeros(ROWS, OUTPUTS, dtype=torch.bfloat16)
    return launched(lambda: torch.autograd.grad(layer(x), x, gradient))


def convolved() -> dict[str, Any]:
    """Return the same of a convolution."""
    products, obstacle = find_convolution_products(torch.device("cuda", 0), "kernels")
    layer = torch.nn.Conv2d(INPUTS, OUTPUTS, 3, padding=1, dtype=torch.bfloat16).requires_grad_(False)
    convolution.convert(layer, "kernels", "cuda")
    x = torch.zeros(2, INPUTS, 24, 40, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.zeros(2, OUTPUTS, 24, 40, dtype=torch.bfloat16)
    return {
        "products": products,
        "obstacle": obstacle,
        "kernels": launched(lambda: torch.autograd.grad(layer(x), x, gradient)),
    }


if __name__ == "__main__":
    torch.set_default_device("cuda")
    measured: dict[str, Any] = {precision: described(precision) for precision in KINDS}
    with replaced(torch, "_scaled_mm", refuse):
        measured |= {f"{precision} without scaled products": described(precision) for precision in KINDS}
    measured["weights"] = passes("int8", "weights")
    measured["convolution"] = convolved()
    print(json.dumps(measured))
