"""LayerNorm and its modulation by a model's conditioning, ``norm(x) * (1 + scale) + shift``, in one kernel.

Upstream's blocks call the norm, and multiply and add on its result: under autocast six passes over an activation, five of them
in fp32. A layer norm's kernel also multiplies and adds, by its weight and bias. So a norm whose result is modulated returns
a :class:`PendingNorm`, which computes nothing before it is multiplied and added to. This module needs torch but not sd-scripts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten


class _ModulatedNorm(torch.autograd.Function):  # type: ignore[misc]  # torch is not followed
    """Compute LayerNorm(x) * scale + shift. Statistics and sums are fp32, the result is rounded once.

    Images of a batch have their own modulations, so each is one launch.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, scale: Any, shift: Any, eps: float) -> Any:
        width = x.shape[-1]
        images = x.reshape(scale.numel() // width, -1, width)
        scales, shifts = scale.reshape(-1, width), shift.reshape(-1, width)
        parts = [_aten.native_layer_norm(images[i], (width,), scales[i], shifts[i], eps) for i in range(len(images))]
        ctx.save_for_backward(images, scales, shifts, *(value for part in parts for value in part[1:]))
        ctx.shapes = x.shape, scale.shape
        return _joined([part[0] for part in parts], x.shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch is not followed
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        images, scales, shifts, *statistics = ctx.saved_tensors
        shape, of_modulation = ctx.shapes
        wanted = list(ctx.needs_input_grad[:3])
        gradients = gradient.reshape(images.shape)
        parts = [
            _aten.native_layer_norm_backward(
                gradients[i], images[i], images.shape[-1:], *statistics[2 * i : 2 * i + 2], scales[i], shifts[i], wanted
            )
            for i in range(len(images))
        ]
        to_x, to_scale, to_shift = zip(*parts, strict=True)
        return (
            _joined(to_x, shape) if wanted[0] else None,
            _joined(to_scale, of_modulation) if wanted[1] else None,
            _joined(to_shift, of_modulation) if wanted[2] else None,
            None,
        )


def _joined(parts: Any, shape: Any) -> Any:
    return (parts[0] if len(parts) == 1 else torch.stack(parts)).view(shape)


def modulated_norm(x: Any, scale: Any, shift: Any, eps: float) -> Any:
    """Return LayerNorm(x) * scale + shift over the last dimension, in the dtype of all three.

    Shapes: ``x`` [..., d]; ``scale``, which includes the 1, and ``shift`` have ``x``'s first dimensions, then ones, then d.
    Source: Peebles and Xie, "DiT", https://arxiv.org/abs/2212.09748, section 3.2.
    """
    values = x, scale, shift
    if x.device.type == "cpu":  # whose kernel adds up 16-bit numbers in 16 bits
        values = tuple(value.to(torch.promote_types(x.dtype, torch.float32)) for value in values)
    with torch.autocast(x.device.type, enabled=False):
        return _ModulatedNorm.apply(*values, eps).to(x.dtype)


def modulation_of(x: Any) -> list[Any]:
    """Return made-up factors and shifts of ``x`` [..., d], [1, ..., d] in its dtype, with gradients of their own."""
    numbers = torch.arange(x.shape[-1], device=x.device, dtype=torch.float32).view(*[1] * (x.dim() - 1), -1)
    return [values.to(torch.bfloat16).to(x.dtype).requires_grad_() for values in (1 + 0.5 * numbers.sin(), numbers.cos())]


class PendingNorm:
    """The result of a LayerNorm without weights, before it is multiplied by a factor and added to a shift.

    Anything else that is done with it computes the norm, and perhaps the product, as upstream.
    """

    def __init__(self, norm: torch.nn.LayerNorm, x: Any, factor: Any = None) -> None:
        self._norm, self._x, self._factor = norm, x, factor

    def value(self) -> Any:
        """Return the tensor."""
        x, norm = self._x, self._norm
        result = torch.nn.functional.layer_norm(x, norm.normalized_shape, None, None, norm.eps)
        return result if self._factor is None else result * self._factor

    def __mul__(self, factor: Any) -> Any:
        if self._factor is None and is_modulation(factor, self._x):
            return PendingNorm(self._norm, self._x, factor)
        return self.value() * factor

    def __add__(self, shift: Any) -> Any:
        factor = self._factor
        if factor is not None and is_modulation(shift, self._x) and shift.shape == factor.shape:
            return modulated_norm(self._x, factor, shift, self._norm.eps)
        return self.value() + shift

    __rmul__, __radd__ = __mul__, __add__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what torch calls for a tensor, which is the left operand, and this one."""
        if func in (torch.Tensor.mul, torch.Tensor.add) and not kwargs and isinstance(args[1], cls):
            return args[1] * args[0] if func is torch.Tensor.mul else args[1] + args[0]
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.value, (args, kwargs or {}))
        return func(*args, **kwargs)


def _of_value(name: str) -> Any:
    return lambda self, *args: getattr(self.value(), name)(*args)


# Python looks operators up on the class.
for _operator in ("getitem", "len", "iter", "neg", "sub", "rsub", "truediv", "rtruediv", "matmul", "pow"):
    setattr(PendingNorm, f"__{_operator}__", _of_value(f"__{_operator}__"))


def is_modulation(values: Any, x: Any) -> bool:
    """Return whether a tensor has one row of factors for each image of ``x``, in its dtype."""
    if not isinstance(values, torch.Tensor) or values.dtype is not x.dtype or values.dim() != x.dim():
        return False
    rows, shape = list(values.shape[:-1]), list(x.shape[:-1])
    images = math.prod(rows)
    leading = next((length for length in range(len(shape)) if math.prod(shape[:length]) == images), None)
    return leading is not None and rows == shape[:leading] + [1] * (len(shape) - leading) and values.shape[-1] == x.shape[-1]
