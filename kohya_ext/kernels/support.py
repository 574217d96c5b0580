"""The GPUs that Triton supports."""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version

from kohya_ext.kernels.triton_package import FIRST_WITHOUT_OLDER, OLDEST


def unsupported_gpu(device: Any = None) -> str | None:
    """Return that the installed Triton does not support a CUDA device, the current one by default; None if it does."""
    import triton

    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST or Version(triton.__version__) < FIRST_WITHOUT_OLDER:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, OLDEST))
    return f"Triton {triton.__version__} supports compute capability {need} and newer, and this GPU has {have}"
