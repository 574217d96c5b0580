"""What an older dynamo cannot trace in one piece, found out by trying, and what of blocks need not be traced at all."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def breaks_the_graph(example: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]) -> bool:
    """Return whether dynamo breaks the graph, or gives up, at a function; ``example`` makes it and what it is called with."""
    import torch
    from torch._dynamo.exc import TorchDynamoException

    function, inputs = example()
    try:
        # Without gradients: this may run inside a checkpoint, which would count what is saved here as the block's.
        with torch.no_grad():
            torch.compile(function, backend="eager", fullgraph=True)(*inputs)
    except TorchDynamoException:
        return True
    return False


def take_einops_whole() -> None:
    """Put ``einops.rearrange`` into graphs as one call, as torch itself does for einops before 0.8.2.

    From there on dynamo follows how einops reads its patterns, character by character: four of seven instructions that are
    traced of SDXL's blocks, in every start. A graph with that call is kept by torch's caches, unlike one with einops' others.
    https://github.com/pytorch/pytorch/blob/v2.6.0/torch/_functorch/_aot_autograd/autograd_cache.py
    """
    import torch._dynamo

    einops = sys.modules.get("einops")
    if einops is not None:
        torch._dynamo.allow_in_graph(einops.rearrange)


def take_group_norm_whole() -> None:
    """Say what a group norm of dynamic sizes gives, which torch finds out by going through all that a group norm consists of.

    A ninth of what is done to trace SDXL's blocks. Only while dynamo traces: what is compiled is divided into parts as before.
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
