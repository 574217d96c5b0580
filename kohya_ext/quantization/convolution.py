"""A frozen 3x3 convolution with int8 weights, whose forward pass and input gradient are 8-bit products.

It is a linear layer (:mod:`kohya_ext.quantization.linear`) at each of the nine taps of its weight: input channels are rotated,
and each output channel and each pixel has a scale. The weight [o, i, 3, 3] has channels last in memory.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from kohya_ext.quantization import arithmetic
from kohya_ext.quantization.linear import ELEMENTS, precision
from kohya_ext.quantization.rotation import BLOCK, GROWTH, rotate

Products = Literal["kernels", "operations", "weights"]
"""How a convolution multiplies: with Triton kernels; with torch's own operations, for CPUs; or without quantizing images, by a
weight that is dequantized in each pass."""

_KIND = torch.int8


def fits(layer: Any) -> bool:
    """Return whether a module is a convolution for the kernels."""
    return (
        type(layer) is torch.nn.Conv2d
        and (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == ((3, 3), (1, 1), (1, 1), (1, 1))
        and layer.groups == 1
        and layer.padding_mode == "zeros"
        and layer.in_channels % BLOCK == 0
        and layer.out_channels % BLOCK == 0
    )


def _rows(weight: Any) -> Any:
    """Return a weight [o, i, 3, 3] as [o, 9 i], a view if it has channels last in memory."""
    return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def _rounded(x: Any) -> Any:
    """Return fp32 images [n, h, w, c], rounded to 8 bits by pixel, as [n, c, h, w]."""
    pixels, scales = arithmetic.quantize(x.reshape(-1, x.shape[-1]), _KIND)
    return (pixels * scales[:, None]).view(x.shape).permute(0, 3, 1, 2)


def _convolution(x: Any, weight: Any, scales: Any, bias: Any, dtype: Any, products: Products) -> Any:
    if products == "kernels":
        from kohya_ext.quantization import convolution_kernels

        return convolution_kernels.forward(x, _rows(weight), scales, bias, dtype)
    x = x.to(dtype)
    if products == "weights":
        return F.conv2d(x, _dequantized(weight, scales).to(dtype), bias, padding=1)
    images = _rounded(rotate(x.permute(0, 2, 3, 1).float()))
    out = F.conv2d(images, weight.float(), padding=1) * scales[:, None, None]
    return (out if bias is None else out + bias[:, None, None]).to(dtype)


def _input_gradient(gradient: Any, weight: Any, scales: Any, dtype: Any, products: Products) -> Any:
    if products == "kernels":
        from kohya_ext.quantization import convolution_kernels

        return convolution_kernels.backward(gradient, _rows(weight), scales, dtype)
    if products == "weights":
        return F.conv_transpose2d(gradient.to(dtype), _dequantized(weight, scales).to(dtype), padding=1)
    images = _rounded(gradient.permute(0, 2, 3, 1).float() * scales)
    out = F.conv_transpose2d(images, weight.float(), padding=1).permute(0, 2, 3, 1)
    return rotate((out / GROWTH).to(dtype), GROWTH).permute(0, 3, 1, 2).contiguous()


class _Convolution(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scales: Any, bias: Any, dtype: Any, products: Products) -> Any:
        ctx.save_for_backward(weight, scales)
        ctx.x_dtype, ctx.settings = x.dtype, (dtype, products)
        return _convolution(x, weight, scales, bias, dtype, products)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        weight, scales = ctx.saved_tensors
        return _input_gradient(gradient, weight, scales, *ctx.settings).to(ctx.x_dtype), None, None, None, None, None


class Conv2d(torch.nn.Conv2d):  # type: ignore[misc]  # torch is not followed
    """A frozen ``torch.nn.Conv2d`` with int8 weights. LoRA networks select layers by this class name."""

    products: Products
    scale_bits: torch.Tensor
    """The fp32 scales [out_channels] as int32, which casts of the model do not change."""

    def forward(self, x: Any) -> Any:
        """Return the convolution of ``x`` [n, c, h, w] in autocast's dtype if that is enabled and else in x's."""
        device, dtype = x.device.type, precision(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        with torch.autocast(device, enabled=False):
            return _Convolution.apply(x, self.weight, self.scales, bias, dtype, self._products(dtype))

    @property
    def scales(self) -> torch.Tensor:
        """The fp32 scales of the output channels, [out_channels]."""
        return self.scale_bits.view(torch.float32)

    def _products(self, dtype: Any) -> Products:
        # As for linear layers, kernels that rotate fp32 would spill registers.
        return "weights" if self.products == "kernels" and dtype is torch.float32 else self.products


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not followed
def convert(layer: torch.nn.Conv2d, products: Products, device: Any) -> None:
    """Change a fitting convolution in place to :class:`Conv2d`. Its weight is quantized on ``device`` and stays on its own."""
    own, (outer, inner) = layer.weight.device, layer.weight.shape[:2]
    parts = []
    for chunk in layer.weight.split(max(1, ELEMENTS // (9 * inner))):
        # A copy also from the device itself: in estimates, host and GPU are one device.
        rows = _rows(chunk.to(device, copy=True).float()).view(-1, inner)
        parts.append(arithmetic.quantize(rotate(rows).view(len(chunk), -1), _KIND))
    bits, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    weight = bits.view(outer, 3, 3, inner).permute(0, 3, 1, 2)
    layer.weight = torch.nn.Parameter(weight.to(own), requires_grad=False)
    layer.register_buffer("scale_bits", scales.view(torch.int32).to(own), persistent=False)
    layer.__class__ = Conv2d
    layer.products = products


def dequantized(layer: Conv2d) -> torch.Tensor:
    """Return the layer's weight [out_channels, in_channels, 3, 3] in fp32, without the rotation."""
    return _dequantized(layer.weight, layer.scales)


def _dequantized(weight: Any, scales: Any) -> Any:
    outer, inner = weight.shape[:2]
    rows = (_rows(weight) * scales[:, None]).view(-1, inner)
    return rotate(rows).view(outer, 3, 3, inner).permute(0, 3, 1, 2)
