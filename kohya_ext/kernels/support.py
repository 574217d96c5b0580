"""The GPUs that Triton supports."""

from __future__ import annotations

from typing import Any

import torch
from packaging.version import Version

#: The oldest compute capability that Triton supports since version 3.3 (torch 2.7). It still compiles for older ones, untested:
#: https://github.com/triton-lang/triton/pull/5066.
OLDEST = (8, 0)
_FIRST_WITHOUT_OLDER = Version("3.3")


def unsupported_gpu(device: Any = None) -> str | None:
    """Return that the installed Triton does not support a CUDA device, the current one by default; None if it does."""
    import triton

    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST or Version(triton.__version__) < _FIRST_WITHOUT_OLDER:
        return None
    have, need = (".".join(map(str, each)) for each in (capability, OLDEST))
    return f"Triton {triton.__version__} supports compute capability {need} and newer, and this GPU has {have}"
