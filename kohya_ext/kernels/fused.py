"""Fused eager operations: LoRA linear layers, GEGLU, SwiGLU, norms and rotary embeddings in fewer passes over memory.

Formulas and precisions are those of the models. Results differ only because 16-bit intermediates are rounded less often and
sums are computed in another order. This module needs torch but not sd-scripts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from kohya_ext.console import warn
from kohya_ext.kernels.triton_package import is_missing


def scaled_product(a: Any, b: Any, factor: float) -> Any:
    """Return ``factor a b``, multiplied by the factor before the sums are rounded, so that fp16 does not overflow earlier."""
    return torch.addmm(a.new_empty(1), a, b, beta=0, alpha=factor)  # with a beta of 0, the first tensor is not read


class _LinearWithLoRA(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute ``x W^T + b + factor (x A^T) B^T``. The matrix products also do the additions, forward and backward.

    Upstream computes two branches. Adding their outputs takes another pass, and so does adding their gradients; each branch
    creates a 16-bit copy of ``x``. The factor scales the hidden rows, which are only as wide as the rank. Scaling B instead
    would leave its gradient, a sum over all rows, unscaled until it is rounded: in fp16 it then overflows earlier.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, down: Any, up: Any, factor: float) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        hidden = scaled_product(rows, down.t(), factor)
        out = torch.nn.functional.linear(rows, weight, bias).addmm_(hidden, up.t())
        ctx.save_for_backward(rows, hidden, weight, down, up)
        ctx.factor = factor
        # As in torch.nn.functional.linear. A compiled block that follows would guard on an ordinary view.
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], out.shape[-1]))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        rows, hidden, weight, down, up = ctx.saved_tensors
        shape, gradient = gradient.shape, gradient.reshape(-1, gradient.shape[-1])
        grad_hidden = scaled_product(gradient, up, ctx.factor)
        grad_x = (gradient @ weight).addmm_(grad_hidden, down).view(*shape[:-1], -1) if ctx.needs_input_grad[0] else None
        grad_down = grad_hidden.t() @ rows if ctx.needs_input_grad[3] else None
        grad_up = gradient.t() @ hidden if ctx.needs_input_grad[4] else None
        return grad_x, None, None, grad_down, grad_up, None


def linear_with_lora(x: Any, weight: Any, bias: Any, down: Any, up: Any, factor: float) -> Any:
    """Return ``x W^T + b + factor (x A^T) B^T`` in the precision of autocast, for frozen W and b.

    Shapes: ``x`` [..., in], ``weight`` W [out, in], ``bias`` b [out] or None, ``down`` A [rank, in], ``up`` B [out, rank];
    the result is [..., out], in autocast's dtype if that is enabled. ``factor`` is multiplier * alpha / rank.
    Source: Hu et al., "LoRA", https://arxiv.org/abs/2106.09685, section 4.1.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, down, up = x.to(dtype), weight.to(dtype), down.to(dtype), up.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    return _LinearWithLoRA.apply(x, weight, bias, down, up, factor)


class _LinearsWithLoRA(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute the same for several layers of one input: their A are one product, their B one batch of products.

    The gradients of the input are added by the products too. W have a product each, because joining them would copy them.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float, count: int, *weights: Any) -> tuple[Any, ...]:
        bases, downs, ups = weights[:count], weights[count : 2 * count], weights[2 * count :]
        rows, (rank, out) = x.reshape(-1, x.shape[-1]), ups[0].t().shape
        hidden = scaled_product(rows, joined(downs).t(), factor)
        outputs = rows.new_empty(count, len(rows), out)
        for output, base in zip(outputs, bases, strict=True):
            torch.mm(rows, base.t(), out=output)
        outputs.baddbmm_(hidden.view(-1, count, rank).transpose(0, 1), joined(ups).view(count, out, rank).transpose(1, 2))
        ctx.save_for_backward(rows, hidden, *weights)
        ctx.factor, ctx.count = factor, count
        return tuple(torch.ops.aten._unsafe_view(output, (*x.shape[:-1], out)) for output in outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        rows, hidden, *weights = ctx.saved_tensors
        count, shape = ctx.count, gradients[0].shape
        bases, downs, ups = weights[:count], weights[count : 2 * count], weights[2 * count :]
        gradients = tuple(gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients)
        grad_hidden = hidden_gradient(gradients, hidden, ups, ctx.factor)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = gradients[0] @ bases[0]
            for gradient, base in zip(gradients[1:], bases[1:], strict=True):
                grad_x.addmm_(gradient, base)
            grad_x = grad_x.addmm_(grad_hidden, joined(downs)).view(*shape[:-1], -1)
        needs = ctx.needs_input_grad[-2 * count :]
        return grad_x, None, None, *(None for _ in bases), *lora_gradients(gradients, rows, hidden, grad_hidden, needs)


def hidden_gradient(gradients: Sequence[Any], hidden: Any, ups: Sequence[Any], factor: float) -> Any:
    """Return the gradient of the hidden rows of several LoRAs, [m, count * rank], for those of their outputs, [m, out]."""
    result = torch.empty_like(hidden)
    for gradient, up, part in zip(gradients, ups, result.chunk(len(ups), dim=1), strict=True):
        torch.addmm(gradient.new_empty(1), gradient, up, beta=0, alpha=factor, out=part)
    return result


def lora_gradients(gradients: Sequence[Any], rows: Any, hidden: Any, grad_hidden: Any, needs: Sequence[bool]) -> list[Any]:
    """Return the gradients of the down weights of LoRAs that read the same rows, which are one product, and of the up weights.

    ``needs``: whether each of these weights needs its gradient. Without any, those of all down or up weights are None.
    """
    count = len(gradients)
    grad_downs = (grad_hidden.t() @ rows).chunk(count) if any(needs[:count]) else [None] * count
    pairs = zip(gradients, hidden.chunk(count, dim=1), strict=True)
    grad_ups = [gradient.t() @ part for gradient, part in pairs] if any(needs[count:]) else [None] * count
    return [*grad_downs, *grad_ups]


def linears_with_lora(x: Any, weights: Sequence[Any], downs: Sequence[Any], ups: Sequence[Any], factor: float) -> list[Any]:
    """Return the results of :func:`linear_with_lora` for layers without bias that read one input and have equal shapes."""
    tensors, device = [x, *weights, *downs, *ups], x.device.type
    if torch.is_autocast_enabled(device):
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    return list(_LinearsWithLoRA.apply(tensors[0], factor, len(weights), *tensors[1:]))


def joined(tensors: Sequence[Any]) -> Any:
    """Return tensors of one shape as one along the first dimension, without a copy if they follow each other in memory."""
    first, size = tensors[0], tensors[0].numel()
    if len(tensors) == 1:
        return first
    storage, start = first.untyped_storage()._cdata, first.storage_offset()
    for index, tensor in enumerate(tensors):
        place = tensor.untyped_storage()._cdata, tensor.storage_offset()
        if place != (storage, start + index * size) or not tensor.is_contiguous():
            return torch.cat([*tensors])
    return first.as_strided((len(tensors) * len(first), *first.shape[1:]), first.stride())


@functools.cache
def elementwise_kernels(device: str, dtype: torch.dtype) -> Any:
    """Return the module of Triton kernels for GEGLU, SwiGLU and rotary embeddings; None where they do not run.

    That is on a CPU, on a GPU that Triton does not support, and without Triton or a C compiler.
    """

    def tried() -> Any:
        from kohya_ext.kernels import elementwise

        halves = torch.zeros(1, 2, device=device, dtype=dtype)
        elementwise.geglu_backward(elementwise.geglu(halves), halves)
        elementwise.rotate(halves[None, None], torch.zeros(1, 1, 1, 1, device=device, dtype=torch.complex64), inverse=False)
        return elementwise

    return usable(device, tried, "gates and rotary embeddings")


def usable(device: str, tried: Callable[[], Any], operations: str) -> Any:
    """Return a module of Triton kernels once they have run; None with a warning if they do not."""
    if device != "cuda" or is_missing():
        return None
    try:
        from kohya_ext.kernels.support import unsupported_gpu

        reason = unsupported_gpu()
        if reason is None:
            return tried()
    except Exception as error:  # no C compiler, or a version of Triton that cannot compile them
        reason = f"its Triton kernels failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    warn(f"--fused_operations: {operations} take more passes over memory, because {reason}")
    return None


class _RMSNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute RMSNorm and save only the input and one number per row, where torch has no RMSNorm kernel.

    Upstream's form saves four fp32 copies of its input.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
        sum_of_squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        inverse = sum_of_squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(x * inverse, weight.float(), out=torch.empty_like(x))  # weights of an fp8 base are fp8 too

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = ((x * inverse) * gradient).flatten(0, -2).sum(0).to(weight.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            scaled = gradient * weight.float()
            projection = (scaled * x).sum(-1, keepdim=True).mul_(inverse.square()).div_(x.shape[-1])
            grad_x = torch.mul(scaled.addcmul_(x, projection, value=-1), inverse, out=torch.empty_like(x))
        return grad_x, grad_weight, None


#: On CUDA, torch 2.9 and newer have one RMSNorm kernel for forward and one for backward. Otherwise it is a composition.
_HAS_RMS_NORM_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm") and torch.cuda.is_available()


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in fp32 and returned in ``x``'s dtype.

    Shapes: ``x`` [..., d], ``weight`` [d]. Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """
    if _HAS_RMS_NORM_KERNEL and x.is_cuda and x.dtype is weight.dtype:
        with torch.autocast("cuda", enabled=False):  # autocast would create fp32 copies
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _Rotation(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Rotate forward and back without copies. torch's backward of a complex view copies non-contiguous gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, rotations: Any, halves: bool) -> Any:
        ctx.save_for_backward(rotations)
        ctx.halves = halves
        return _rotated(x, rotations, False, halves)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        (rotations,) = ctx.saved_tensors
        return _rotated(gradient, rotations, True, ctx.halves), None, None


def _rotated(x: Any, rotations: Any, inverse: bool, halves: bool) -> Any:
    kernels = elementwise_kernels(x.device.type, x.dtype)
    if kernels is not None and kernels.rotates(x, rotations):
        return kernels.rotate(x, rotations, inverse, halves)
    if kernels is not None and x.dim() == 4 and kernels.rotates(x.transpose(1, 2), rotations.transpose(1, 2)):
        return kernels.rotate(x.transpose(1, 2), rotations.transpose(1, 2), inverse, halves).transpose(1, 2)
    if halves:
        out, sign = torch.empty_like(x), -1 if inverse else 1
        (first, second), (to_first, to_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        torch.mul(first, rotations.real, out=to_first).addcmul_(second, rotations.imag, value=-sign)
        torch.mul(second, rotations.real, out=to_second).addcmul_(first, rotations.imag, value=sign)
        return out
    pairs = torch.view_as_complex(x.to(torch.float32, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * (rotations.conj_physical() if inverse else rotations)).flatten(-2).type_as(x)


def rotate(x: Any, rotations: Any, halves: bool = False) -> Any:
    """Return ``x`` with pairs of elements rotated, as a complex product, in ``x``'s dtype.

    A pair are adjacent elements, or with ``halves`` those at one place in both halves of d. Shapes: ``x`` [..., d],
    ``rotations`` [..., d / 2], complex64, broadcast against it. Source: Su et al., "RoFormer",
    https://arxiv.org/abs/2104.09864, section 3.4.2.
    """
    return _Rotation.apply(x, rotations, halves)


def layer_norm(x: Any, module: torch.nn.LayerNorm) -> Any:
    """Return ``module(x)`` in the dtype of ``x``, which must be that of the weights. Statistics are computed in fp32.

    Autocast would return fp32, which every consumer then rounds.
    """
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)


def group_norm(x: Any, module: torch.nn.GroupNorm) -> Any:
    """Return the same for a group norm. After autocast's, the activation function that follows would run in fp32 as well."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)


class _GEGLU(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute ``value * gelu(gate)``. Backward recomputes gelu and writes both gradients into one tensor.

    Upstream's form also saves gelu's output, and copies both gradients to join them.
    """

    @staticmethod
    def forward(ctx: Any, halves: Any) -> Any:
        ctx.save_for_backward(halves)
        if (kernels := elementwise_kernels(halves.device.type, halves.dtype)) is not None:
            return kernels.geglu(halves.contiguous())
        value, gate = halves.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate).mul_(value)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> Any:
        (halves,) = ctx.saved_tensors
        if (kernels := elementwise_kernels(halves.device.type, halves.dtype)) is not None:
            return kernels.geglu_backward(gradient.contiguous(), halves.contiguous())
        value, gate = halves.chunk(2, dim=-1)
        result = torch.empty_like(halves)
        grad_value, grad_gate = result.chunk(2, dim=-1)
        torch.mul(gradient, torch.nn.functional.gelu(gate), out=grad_value)
        torch.ops.aten.gelu_backward.grad_input(gradient * value, gate, grad_input=grad_gate)
        return result


def geglu(halves: Any) -> Any:
    """Return ``value * gelu(gate)``, the two halves of the last dimension.

    Shapes: ``halves`` [..., 2 d]; the result is [..., d]. Source: Shazeer, https://arxiv.org/abs/2002.05202.
    """
    return _GEGLU.apply(halves)


class _SwiGLU(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute ``silu(gate) * value`` with Triton. Backward recomputes silu, whose output upstream's form also saves."""

    @staticmethod
    def forward(ctx: Any, gate: Any, value: Any) -> Any:
        ctx.save_for_backward(gate, value)
        return elementwise_kernels(gate.device.type, gate.dtype).swiglu(gate.contiguous(), value.contiguous())

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> Any:
        tensors = [tensor.contiguous() for tensor in (gradient, *ctx.saved_tensors)]
        return elementwise_kernels(gradient.device.type, gradient.dtype).swiglu_backward(*tensors)


def swiglu(gate: Any, value: Any) -> Any:
    """Return ``silu(gate) * value``, of one shape and dtype. Source: Shazeer, https://arxiv.org/abs/2002.05202.

    Without Triton's kernels it is computed by torch's operators, which move fewer bytes than a recomputation would.
    """
    if elementwise_kernels(gate.device.type, gate.dtype) is None:
        return torch.nn.functional.silu(gate) * value
    return _SwiGLU.apply(gate, value)
