"""How many kernels of modulated norms sum rows and columns together, by torch's default and with our settings, as JSON."""

import json

import torch
import torch._inductor.compile_fx
from torch._inductor import config, metrics
from torch.nn import functional

from kohya_ext.compiling.configuration import prepare_torch


def modulated(x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
    """Return tokens that are normalized, shifted and scaled twice, as in a DiT's block."""
    for shift, scale in (modulation[:, :2].unbind(1), modulation[:, 2:].unbind(1)):
        x = x + functional.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None]
    return x


def kernels() -> int:
    """Compile both passes; return how many of these kernels they have."""
    torch._dynamo.reset()
    metrics.reset()
    inputs = (torch.zeros(1, 8192, 1024, requires_grad=True), torch.zeros(1, 4, 1024, requires_grad=True))
    torch.compile(modulated, fullgraph=True)(*inputs).sum().backward()
    return int(metrics.codegen_mix_order_reduction)


if __name__ == "__main__":
    torch.set_default_device("cuda")
    config.force_disable_caches = True  # code from a cache is not counted
    default = kernels()
    prepare_torch()
    print(json.dumps([default, kernels()]))
