"""Checks whether a device can multiply in 8 bits with the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from kohya_ext.kernels.triton_package import missing_triton
from kohya_ext.quantization import convolution
from kohya_ext.quantization.linear import Products, convert
from kohya_ext.quantization.rotation import BLOCK

#: Compute capabilities from which Triton multiplies each format on tensor cores: Ampere, Ada.
OLDEST = {torch.int8: (8, 0), torch.float8_e4m3fn: (8, 9)}


def find_products(device: Any, kind: torch.dtype) -> tuple[Products, str | None]:
    """Return how layers multiply on a CUDA device, after a forward and a backward pass on it.

    If the kernels cannot run, layers dequantize their weights, and the second value is the reason.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST[kind]:
        have, need = (".".join(map(str, each)) for each in (capability, OLDEST[kind]))
        return "weights", f"the GPU has compute capability {have}, and 8-bit products need {need}"
    if (missing := missing_triton()) is not None:
        return "weights", missing
    if kind is not torch.int8 and _failure(device, kind, "kernels") is None:
        return "kernels", None
    # torch has no row-wise scaled product on Windows, and before 2.7 none for compute capability 8.9.
    products: Products = "kernels" if kind is torch.int8 else "triton"
    failure = _failure(device, kind, products)
    return (products, None) if failure is None else ("weights", f"Triton's kernels failed: {failure}")


def find_convolution_products(device: Any, products: Products) -> tuple[convolution.Products | None, str | None]:
    """Return how convolutions multiply where int8 linear layers do it as :func:`find_products` has found.

    None if they stay in 16 bits: dequantized weights would save memory only. The second value is the reason.
    """
    if products == "operations":
        return products, None
    if products != "kernels":
        return None, "the GPU cannot multiply in 8 bits"
    layer = _frozen(torch.nn.Conv2d, device, kernel_size=3, padding=1)
    convolution.convert(layer, "kernels", device)
    x = torch.zeros(1, BLOCK, 8, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        torch.autograd.grad(layer(x).sum(), x)
    except Exception as error:  # as of linear layers
        return None, f"Triton's kernels failed: {_first_line(error)}"
    return "kernels", None


def _frozen(kind: Any, device: Any, **options: Any) -> Any:
    """Return a layer of zeros. Random weights would advance the generator from which the run draws its noise."""
    layer = torch.nn.utils.skip_init(kind, BLOCK, BLOCK, **options, device=device, dtype=torch.bfloat16).requires_grad_(False)
    for weight in layer.parameters():
        weight.zero_()
    return layer


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _failure(device: Any, kind: torch.dtype, products: Products) -> str | None:
    """Return the error of a forward and a backward pass; None if both succeed."""
    layer = _frozen(torch.nn.Linear, device)
    convert(layer, kind, products, device)
    x = torch.zeros(BLOCK, BLOCK, device=device, dtype=torch.bfloat16, requires_grad=True)
    try:
        torch.autograd.grad(layer(x).sum(), x)
        if kind is torch.int8 or products == "triton":  # torch adds a LoRA with a workspace that would be created too early
            _multiply_with_lora(layer, x.detach())
    except Exception as error:  # no C compiler, or a version of Triton that cannot compile them
        return _first_line(error)
    return None


def _multiply_with_lora(layer: Any, rows: torch.Tensor) -> None:
    from kohya_ext.quantization import kernels

    weights, dtype, lora = (layer.weight, layer.scales), rows.dtype, (rows, rows)
    kernels.forward(kernels.quantized_input(rows, layer.kind, dtype), *weights, None, dtype, lora, by_torch=False)
    kernels.backward(rows, *weights, dtype, layer.kind, lora, by_torch=False)
