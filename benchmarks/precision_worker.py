"""Run a training command on the CPU and write the loss of each step as JSON.

python -m benchmarks.precision_worker RESULT arguments of kohya_ext...
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_size_worker import skip_checkpoint_hashes


def main() -> None:
    """Run the command, and write its losses, also after an error."""
    result = Path(sys.argv[1])
    sys.argv = ["kohya_ext", *sys.argv[2:]]
    skip_checkpoint_hashes()
    losses: list[float] = []
    backward = torch.Tensor.backward

    def record(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.numel() == 1:
            losses.append(tensor.item())
        return backward(tensor, *args, **kwargs)

    torch.Tensor.backward = record
    try:
        runpy.run_module("kohya_ext", run_name="__main__", alter_sys=True)
    finally:
        result.write_text(json.dumps(losses) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
