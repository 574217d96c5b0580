"""Shortcuts for code that is slow to trace."""

from __future__ import annotations

import sys
from typing import Any


def allow_einops_in_graph() -> None:
    """Keep ``einops.rearrange`` as one call in graphs, as torch does for einops before 0.8.2.

    With newer versions dynamo traces how einops parses its pattern, which is 4 of 7 instructions traced in SDXL's blocks.
    torch's caches accept a graph with this call, but none with einops' other functions.
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_functorch/_aot_autograd/autograd_cache.py
    """
    import torch._dynamo

    einops = sys.modules.get("einops")
    if einops is not None:
        torch._dynamo.allow_in_graph(einops.rearrange)


def register_group_norm_shapes() -> None:
    """Register the output shapes of a group norm with dynamic sizes, which torch derives by running its decomposition.

    That takes a ninth of the time to trace SDXL's blocks. It affects only tracing; the compiled code is the same.
    https://github.com/pytorch/pytorch/blob/main/torch/_refs/__init__.py (``native_group_norm``)
    """
    import torch
    from torch._prims_common import suggest_memory_format
    from torch._subclasses import fake_impls

    if not hasattr(fake_impls, "register_fast_op_impl"):
        return

    def fake(mode: Any, x: Any, weight: Any, bias: Any, batch: Any, channels: Any, pixels: Any, groups: Any, eps: Any) -> Any:
        with mode:
            mean, rstd = (x.new_empty((batch, groups)) for _ in range(2))
            return torch.empty_like(x, memory_format=suggest_memory_format(x)), mean, rstd

    fake_impls.register_fast_op_impl(torch.ops.aten.native_group_norm.default)(fake)
