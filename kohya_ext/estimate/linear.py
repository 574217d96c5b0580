"""Linear layers that allocate what they allocate for ordinary tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def bias_in_place() -> Iterator[None]:
    """Let linear layers add their bias in place inside the block, which PyTorch does not do under a dispatch mode.

    Source: aten/src/ATen/native/Linear.cpp.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("linear", _linear, "CompositeImplicitAutograd")
        yield
    finally:
        library._destroy()


def _linear(values: Any, weight: Any, bias: Any = None) -> Any:
    if bias is None:
        return torch.matmul(values, weight.t())
    if values.dim() == 2:
        return torch.addmm(bias, values, weight.t())
    if values.is_contiguous():
        return torch.addmm(bias, values.reshape(-1, values.shape[-1]), weight.t()).view(*values.shape[:-1], weight.shape[0])
    return torch.matmul(values, weight.t()).add_(bias)
