"""CUDA's autocast rules on the CPU.

CPU autocast keeps some operators in 16 bits that CUDA's autocast runs in fp32, so a step saves other tensors: a layer norm
under CUDA's autocast returns fp32. Source of the lists: aten/src/ATen/autocast_mode.h.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Operators of training and sampling that CUDA's autocast runs in fp32, unlike the CPU's.
FP32_INPUT = (
    "layer_norm", "native_layer_norm", "group_norm", "rms_norm", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "exp",
    "expm1", "rsqrt", "norm.Scalar", "norm.ScalarOpt_dim", "softplus", "log", "log10", "log2", "log1p", "reciprocal",
    "cosine_similarity", "cdist", "logsumexp", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip

#: Operators whose result CUDA's autocast returns in fp32, without casting their input.
FP32_RESULT = ("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "prod", "cumsum", "cumprod", "linalg_vector_norm")


#: The types that CUDA's autocast casts to fp32, and those in 8 bits, which it casts, too.
LOWER = (torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@contextmanager
def cuda_rules(lower: Collection[torch.dtype] = LOWER) -> Iterator[None]:
    """Make CPU autocast follow CUDA's list inside the block: operators in it cast ``lower`` types.

    Estimates without a dry run leave 8 bits as they are, which is next to no memory.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for names, rule in ((FP32_INPUT, _with_fp32_input), (FP32_RESULT, _with_fp32_result)):
            for name in names:
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(operator, rule(operator, lower), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _with_fp32_input(operator: Any, lower: Collection[torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operator(
                *(_in_fp32(value, lower) for value in args), **{key: _in_fp32(value, lower) for key, value in kwargs.items()}
            )

    return run


def _with_fp32_result(operator: Any, lower: Collection[torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            if kwargs.get("dtype") is None and _has_type(args[0], lower):
                kwargs["dtype"] = torch.float32
            return operator(*args, **kwargs)

    return run


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _has_type(value: object, types: Collection[torch.dtype]) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in types


def _in_fp32(value: Any, lower: Collection[torch.dtype]) -> Any:
    return value.float() if _has_type(value, lower) else value
