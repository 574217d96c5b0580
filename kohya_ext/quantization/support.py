"""Checks whether a device can multiply 8-bit rows with the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch

from kohya_ext.quantization.linear import convert
from kohya_ext.quantization.rotation import BLOCK

#: Compute capabilities from which Triton multiplies each format on tensor cores: Ampere, Ada.
OLDEST = {torch.int8: (8, 0), torch.float8_e4m3fn: (8, 9)}


def kernels_obstacle(device: Any, kind: torch.dtype) -> str | None:
    """Return why the kernels cannot run on a CUDA device, after a forward and a backward pass on it; None if they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST[kind]:
        have, need = (".".join(map(str, each)) for each in (capability, OLDEST[kind]))
        return f"the GPU has compute capability {have}, and 8-bit products need {need}"
    # Random weights would advance the generator from which the run draws its noise.
    layer = torch.nn.utils.skip_init(torch.nn.Linear, BLOCK, BLOCK, device=device, dtype=torch.bfloat16).requires_grad_(False)
    for weight in layer.parameters():
        weight.zero_()
    convert(layer, kind, "kernels", device)
    x, down, up = (torch.zeros(BLOCK, BLOCK, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    try:
        torch.autograd.grad(layer(x).sum() + layer.with_lora(x, down, up).sum(), x)
    except Exception as error:  # no Triton, no C compiler, or a version that cannot compile them
        return f"Triton's kernels failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None
