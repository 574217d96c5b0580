"""A frozen linear layer with 8-bit weights, whose forward pass and input gradient are 8-bit products.

The weight W [n, k] is stored as ``W H = diag(s) Q``: the rotation H of :mod:`kohya_ext.quantization.rotation` (int8 only), a
fp32 scale s per output channel, and 8-bit Q. Forward quantizes the rows of ``x H``. Backward quantizes the rows of the output
gradient times s, and rotates the product. No activation is saved for backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from kohya_ext.kernels.fused import hidden_gradient, joined, lora_gradients, scaled_product
from kohya_ext.quantization import rotation
from kohya_ext.quantization.arithmetic import ROTATED, LoRA, multiply, quantize
from kohya_ext.quantization.rotation import BLOCK, GROWTH

#: ``--base_precision`` -> its 8-bit format.
KINDS: Mapping[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

Products = Literal["kernels", "triton", "operations", "weights"]
"""How a layer multiplies: with Triton kernels, and fp8 in bf16 with torch's scaled product; with Triton kernels alone, where
torch lacks that product; with torch's own operations, for CPUs; or without quantizing activations, by weights that are
dequantized in each pass."""

_BY_KERNELS = ("kernels", "triton")

#: Products of up to this many rows read more weight than activation, so they dequantize the weight. cuBLAS has the same limit.
FEW_ROWS = 16

#: The number of elements of a weight that are quantized together, which limits temporary memory.
ELEMENTS = 1 << 24


def rotate(rows: Any, kind: torch.dtype, factor: float = 1.0) -> Any:
    """Return the rows [..., width] times ``factor``, rotated if the 8-bit format needs it. The rotation is its own inverse."""
    return rotation.rotate(rows, factor) if kind in ROTATED else rows


def _operand(x: Any, dtype: Any, kind: torch.dtype, products: Products) -> tuple[Any, Any]:
    """Return the rows ``x`` [m, k] as a product reads them, in ``dtype`` or 8 bits, and the scales of 8-bit rows.

    They depend on no weight, so that layers of one input can share them.
    """
    if products in _BY_KERNELS:
        from kohya_ext.quantization import kernels

        return kernels.quantized_input(x, kind, dtype)
    x = x.to(dtype)
    if products == "weights":
        return (rotation.rotate(x, 1 / GROWTH) if kind in ROTATED else x), None
    return quantize(rotate(x.float(), kind), kind)


def _product(
    operand: tuple[Any, Any], weight: Any, scales: Any, bias: Any, dtype: Any, kind: Any, products: Products, lora: Any = None
) -> Any:
    """Return ``x W^T + b`` in ``dtype`` for the operand of rows [m, k], plus the LoRA's product."""
    if products in _BY_KERNELS:
        from kohya_ext.quantization import kernels

        return kernels.forward(operand, weight, scales, bias, dtype, lora, by_torch=products == "kernels")
    rows, row_scales = operand
    if products == "weights":
        out = _by_weights(rows, weight, scales, bias, kind)
    else:
        out = multiply(rows, weight.view(kind)) * row_scales[:, None] * scales
        out = (out if bias is None else out + bias).to(dtype)
    return out if lora is None else out.addmm_(*lora)


def _input_gradient(
    gradient: Any, weight: Any, scales: Any, dtype: Any, kind: torch.dtype, products: Products, lora: LoRA | None = None
) -> Any:
    """Return ``gradient W`` in ``dtype`` for output gradients [m, n], plus the LoRA's product."""
    if products in _BY_KERNELS:
        from kohya_ext.quantization import kernels

        return kernels.backward(gradient, weight, scales, dtype, kind, lora, by_torch=products == "kernels")
    if products == "weights":
        out = _gradient_by_weights(gradient.to(dtype), weight, scales, kind)
    else:
        rows, row_scales = quantize(gradient.float() * scales, kind)
        out = multiply(rows, weight.view(kind).t()) * row_scales[:, None]
        out = rotation.rotate((out / GROWTH).to(dtype), GROWTH) if kind in ROTATED else out.to(dtype)
    return out if lora is None else out.addmm_(*lora)


# A rotation can raise an element to eight times its size, which fp16 may not represent. So rotated values are kept at an
# eighth, and the weight's scales take the factor. Powers of two change no rounding.


def _by_weights(x: Any, weight: Any, scales: Any, bias: Any, kind: torch.dtype) -> Any:
    """Return ``x W^T + b`` from a weight in the dtype of ``x``, which is rotated, and an eighth, if the format needs it."""
    if kind in ROTATED:
        scales = scales * GROWTH
    elif _scales_rows(kind, x, weight.shape[1] // (1 if bias is None else 2)):
        out = torch.nn.functional.linear(x, weight.view(kind).to(x.dtype)).mul_(scales)
        return out if bias is None else out.add_(bias)
    return torch.nn.functional.linear(x, _dequantized(weight, scales, x.dtype, kind), bias)


def _gradient_by_weights(gradient: Any, weight: Any, scales: Any, kind: torch.dtype) -> Any:
    """Return ``gradient W`` from a weight in the dtype of ``gradient``."""
    if kind in ROTATED:
        out = gradient @ _dequantized(weight, scales / GROWTH, gradient.dtype, kind)
        return rotation.rotate(out, GROWTH)
    if _scales_rows(kind, gradient, weight.shape[1]):
        scaled = torch.mul(gradient, scales, out=gradient.new_empty(gradient.shape))
        return scaled @ weight.view(kind).to(gradient.dtype)
    return gradient @ _dequantized(weight, scales, gradient.dtype, kind)


def _scales_rows(kind: torch.dtype, rows: Any, most: int) -> bool:
    """Return whether the scales are applied to up to ``most`` rows of a product instead of its weight.

    torch multiplies no fp8 tensor by another dtype, so scaling the weight takes a second pass over it. More rows are larger
    than the weight: on an H200, 4,608 scaled rows took a third longer (benchmarks/results/gpu_product_paths.json). fp16 cannot
    represent unscaled products.
    """
    return kind is not torch.int8 and rows.dtype is not torch.float16 and rows.shape[0] < most


def _dequantized(weight: Any, scales: Any, dtype: Any, kind: torch.dtype) -> Any:
    """Return ``diag(scales) Q`` in ``dtype``, for int8 in one pass that reads a byte and writes an element."""
    if kind is torch.int8:
        return torch.mul(weight, scales[:, None], out=torch.empty(weight.shape, dtype=dtype, device=weight.device))
    return weight.view(kind).to(dtype).mul_(scales[:, None])


class _Linear(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scales: Any, bias: Any, dtype: Any, kind: Any, products: Products) -> Any:
        ctx.save_for_backward(weight, scales)
        ctx.x_dtype, ctx.settings = x.dtype, (dtype, kind, products)
        return _product(_operand(x, dtype, kind, products), weight, scales, bias, dtype, kind, products)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        weight, scales = ctx.saved_tensors
        return _input_gradient(gradient, weight, scales, *ctx.settings).to(ctx.x_dtype), None, None, None, None, None, None


class _LinearsWithLoRA(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute ``x W^T + b + factor (x A^T) B^T`` for one or several layers of one input.

    The input is quantized once, and all A are one product. A layer's product adds its LoRA's. In the backward pass, the first
    layer's product adds those of all.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float, kind: Any, products: Products, count: int, *tensors: Any) -> tuple[Any, ...]:
        weights, scales, biases, downs, ups = _parts(tensors, count)
        hidden = scaled_product(x, joined(downs).t(), factor)
        ctx.save_for_backward(x, hidden, *weights, *scales, *downs, *ups)
        ctx.settings = factor, kind, products, count
        operand = _operand(x, x.dtype, kind, products)
        return tuple(
            _product(operand, weight, of_rows, bias, x.dtype, kind, products, (part, up.t()))
            for weight, of_rows, bias, part, up in zip(weights, scales, biases, hidden.chunk(count, dim=1), ups, strict=True)
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        factor, kind, products, count = ctx.settings
        x, hidden, *tensors = ctx.saved_tensors
        weights, scales, downs, ups = _parts(tensors, count)
        grad_hidden = hidden_gradient(gradients, hidden, ups, factor)
        grad_x = None
        if ctx.needs_input_grad[0]:
            for gradient, weight, of_rows in zip(gradients, weights, scales, strict=True):
                lora = (grad_hidden, joined(downs)) if grad_x is None else None
                part = _input_gradient(gradient, weight, of_rows, x.dtype, kind, products, lora)
                grad_x = part if grad_x is None else grad_x.add_(part)
        needs = ctx.needs_input_grad[-2 * count :]
        return grad_x, *[None] * (4 + 3 * count), *lora_gradients(gradients, x, hidden, grad_hidden, needs)


def _parts(tensors: Sequence[Any], count: int) -> list[Sequence[Any]]:
    return [tensors[start : start + count] for start in range(0, len(tensors), count)]


def linears_with_lora(x: Any, layers: Sequence[Linear], downs: Sequence[Any], ups: Sequence[Any], factor: float) -> list[Any]:
    """Return ``layer(x) + factor (x down^T) up^T`` for layers that read one input and have one shape and 8-bit format.

    Shapes: ``downs`` [rank, in_features], ``ups`` [out_features, rank]. The quantized input is bit for bit that of each layer
    alone. The sums in x down^T, and in the gradient of x, may have another order.
    """
    device, dtype, first = x.device.type, precision(x), layers[0]
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    weights, scales = [layer.weight for layer in layers], [layer.scales for layer in layers]
    biases = [None if layer.bias is None else layer.bias.to(dtype) for layer in layers]
    loras = [weight.to(dtype) for weight in (*downs, *ups)]
    with torch.autocast(device, enabled=False):
        form = factor, first.kind, first._products(rows, dtype), len(layers)
        outputs = _LinearsWithLoRA.apply(rows, *form, *weights, *scales, *biases, *loras)
    return [torch.ops.aten._unsafe_view(output, (*x.shape[:-1], output.shape[-1])) for output in outputs]


class Linear(torch.nn.Linear):  # type: ignore[misc]  # torch is not followed
    """A frozen ``torch.nn.Linear`` with 8-bit weights. LoRA networks select layers by this class name."""

    kind: torch.dtype
    """The 8-bit format; the weight contains its bits as int8, which casts of the model do not change."""
    products: Products
    scale_bits: torch.Tensor
    """The fp32 scales [out_features] as int32, which casts of the model do not change."""

    def forward(self, x: Any) -> Any:
        """Return ``x W^T + b``, [..., out_features], in autocast's dtype if that is enabled and else in x's."""
        device, dtype = x.device.type, precision(x)
        rows = x.reshape(-1, x.shape[-1])
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(device, enabled=False):
            out = _Linear.apply(rows, self.weight, self.scales, bias, dtype, self.kind, self._products(rows, dtype))
        # As in torch.nn.functional.linear. A compiled block that follows would guard on an ordinary view.
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))

    def with_lora(self, x: Any, down: Any, up: Any, factor: float) -> Any:
        """Return ``forward(x) + factor (x down^T) up^T`` for ``down`` [rank, in_features] and ``up`` [out_features, rank]."""
        return linears_with_lora(x, [self], [down], [up], factor)[0]

    @property
    def scales(self) -> torch.Tensor:
        """The fp32 scales of the output channels, [out_features]."""
        return self.scale_bits.view(torch.float32)

    def _products(self, rows: Any, dtype: Any) -> Products:
        # Kernels that rotate fp32 spill thousands of bytes of registers (benchmarks/kernel_resources.py).
        is_slow = self.products in _BY_KERNELS and dtype is torch.float32
        return "weights" if rows.shape[0] <= FEW_ROWS or is_slow else self.products


def precision(x: Any) -> Any:
    """Return the dtype in which a layer computes: autocast's if that is enabled, and else that of its input."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not followed
def quantized(weight: torch.Tensor, kind: torch.dtype, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out_features, in_features] in 8 bits, as int8, and the fp32 scales of its rows, both on ``device``."""
    chunks = weight.split(max(1, ELEMENTS // weight.shape[1]))
    # A copy also from the device itself: in estimates, host and GPU are one device.
    parts = [quantize(rotate(chunk.to(device, copy=True).float(), kind), kind) for chunk in chunks]
    return torch.cat([part.view(torch.int8) for part, _ in parts]), torch.cat([part for _, part in parts])


def convert(layer: torch.nn.Linear, kind: torch.dtype, products: Products, device: Any) -> None:
    """Change a linear layer in place to :class:`Linear`. Its weight is quantized on ``device`` and stays on its own."""
    install(layer, kind, products, *quantized(layer.weight, kind, device))


def install(layer: torch.nn.Linear, kind: torch.dtype, products: Products, bits: torch.Tensor, scales: torch.Tensor) -> None:
    """Change a linear layer in place to :class:`Linear` with the results of :func:`quantized`, on its weight's device.

    The kernels need multiples of the rotation's block as widths; other layers dequantize their weight instead.
    """
    device = layer.weight.device
    layer.weight = torch.nn.Parameter(bits.to(device), requires_grad=False)
    layer.register_buffer("scale_bits", scales.view(torch.int32).to(device), persistent=False)
    layer.__class__ = Linear
    layer.kind = kind
    fits = layer.in_features % BLOCK == 0 and layer.out_features % BLOCK == 0
    layer.products = products if fits or products not in _BY_KERNELS else "weights"


def dequantized(layer: Linear) -> torch.Tensor:
    """Return the layer's weight [out_features, in_features] in fp32, without the rotation."""
    return rotate(_dequantized(layer.weight, layer.scales, torch.float32, layer.kind), layer.kind)
