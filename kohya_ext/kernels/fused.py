"""What eager mode does in many passes over an activation, in few: LoRA's product and sum, gates, norms, rotations.

The formulas are the models' own, and so are the precisions of what is computed and kept; what differs is how often a
16-bit intermediate is rounded (less often) and in which order a sum is made. torch only, no sd-scripts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _LinearWithLoRA(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """``x W^T + b + (x A^T) B^T``: the sums, forward and backward, are made by the matrix products themselves.

    Upstream's form is two branches: their outputs are added in a pass of their own, so are their gradients, and each
    branch makes its own 16-bit copy of ``x``.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, down: Any, up: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        narrow = rows @ down.t()
        out = torch.nn.functional.linear(rows, weight, bias).addmm_(narrow, up.t())
        ctx.save_for_backward(rows, narrow, weight, down, up)
        # As torch.nn.functional.linear does it: no view of a base, which a compiled block behind it would be guarded for.
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        rows, narrow, weight, down, up = ctx.saved_tensors
        shape, gradient = gradient.shape, gradient.reshape(-1, gradient.shape[-1])
        of_narrow = gradient @ up
        of_x = (gradient @ weight).addmm_(of_narrow, down).view(*shape[:-1], -1) if ctx.needs_input_grad[0] else None
        of_down = of_narrow.t() @ rows if ctx.needs_input_grad[3] else None
        of_up = gradient.t() @ narrow if ctx.needs_input_grad[4] else None
        return of_x, None, None, of_down, of_up


def linear_with_lora(x: Any, weight: Any, bias: Any, down: Any, up: Any, factor: float) -> Any:
    """Return ``x W^T + b + factor (x A^T) B^T`` as autocast would compute it, for a frozen base.

    Shapes: ``x`` [..., in], ``weight`` W [out, in], ``bias`` b [out] or None, ``down`` A [rank, in], ``up`` B [out, rank];
    the result is [..., out], in autocast's dtype where that is on. ``factor`` (multiplier * alpha / rank) is applied to B.
    Source: Hu et al., "LoRA", https://arxiv.org/abs/2106.09685, section 4.1.
    """
    if factor != 1.0:
        up = up * factor
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, down, up = x.to(dtype), weight.to(dtype), down.to(dtype), up.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    return _LinearWithLoRA.apply(x, weight, bias, down, up)


class _RMSNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """RMSNorm that keeps its input and one number a row, for where torch has no kernel of its own.

    Upstream's form keeps four copies of its input, in 32 bits each.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        power = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = power.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x * inverse, weight.float(), out=torch.empty_like(x))  # a base in fp8 has its weights in it too

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, weight, inverse = ctx.saved_tensors
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = ((x * inverse) * gradient).flatten(0, -2).sum(0).to(weight.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            wide = gradient * weight.float()
            along = (wide * x).sum(-1, keepdim=True).mul_(inverse.square()).div_(x.shape[-1])
            of_x = torch.mul(wide.addcmul_(x, along, value=-1), inverse, out=torch.empty_like(x))
        return of_x, of_weight, None


#: From 2.9 on torch has RMSNorm as one kernel forward and one backward, on CUDA; before and elsewhere it is a composition.
_HAS_RMS_NORM_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm") and torch.cuda.is_available()


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension: computed in fp32, in ``x``'s dtype.

    Shapes: ``x`` [..., d], ``weight`` [d]. Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """
    if _HAS_RMS_NORM_KERNEL and x.is_cuda and x.dtype is weight.dtype:
        with torch.autocast("cuda", enabled=False):  # which would make copies of 32 bits for it
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _Rotation(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """A rotation, and back. torch's own backward of a view as complex numbers copies what is not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Any, rotations: Any) -> Any:
        ctx.save_for_backward(rotations)
        return _turned(x, rotations)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (rotations,) = ctx.saved_tensors
        return _turned(gradient, rotations.conj_physical()), None


def _turned(x: Any, rotations: Any) -> Any:
    pairs = torch.view_as_complex(x.to(torch.float32, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)


def rotate(x: Any, rotations: Any) -> Any:
    """Return ``x`` with each pair of neighbouring numbers turned, as a product of complex numbers, in ``x``'s dtype.

    Shapes: ``x`` [..., d], ``rotations`` [..., d / 2], complex64, broadcast against it. Source: Su et al., "RoFormer",
    https://arxiv.org/abs/2104.09864, section 3.4.2.
    """
    return _Rotation.apply(x, rotations)


def layer_norm(x: Any, module: torch.nn.LayerNorm) -> Any:
    """Return ``module`` of ``x`` in ``x``'s dtype, which is its weights': statistics in fp32, rounded once.

    Autocast would return fp32, for each reader to round.
    """
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


class _GEGLU(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """``value * gelu(gate)`` of two halves: gelu is not kept but computed again, and both gradients are written in one place.

    Upstream's form keeps gelu's output beside the halves, and makes the gradient of both by a copy of each.
    """

    @staticmethod
    def forward(ctx: Any, halves: Any) -> Any:
        ctx.save_for_backward(halves)
        value, gate = halves.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate).mul_(value)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> Any:
        (halves,) = ctx.saved_tensors
        value, gate = halves.chunk(2, dim=-1)
        result = torch.empty_like(halves)
        of_value, of_gate = result.chunk(2, dim=-1)
        torch.mul(gradient, torch.nn.functional.gelu(gate), out=of_value)
        torch.ops.aten.gelu_backward.grad_input(gradient * value, gate, grad_input=of_gate)
        return result


def geglu(halves: Any) -> Any:
    """Return the first half of the last dimension times gelu of the second.

    Shapes: ``halves`` [..., 2 d]; the result is [..., d]. Source: Shazeer, https://arxiv.org/abs/2002.05202.
    """
    return _GEGLU.apply(halves)
