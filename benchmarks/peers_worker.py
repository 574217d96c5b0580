"""Run another trainer's script on a virtual GPU and write its launches, waits and host time as JSON.

    python -m benchmarks.peers_worker RESULT PASSES SCRIPT arguments of the script...

The run ends before the backward pass after ``PASSES``, so it never saves; host memory holds no weights (see full_size_worker).
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.full_size_worker import end_after, leave_host_memory_empty


def main() -> None:
    """Run the script and write the result, also after an error."""
    result, passes, script = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    sys.argv = sys.argv[3:]
    sys.path[:0] = [str(script.parent), str(script.parents[1])]  # its modules, and its package
    leave_host_memory_empty()
    return_one_index()
    # The tiny tokenizer has no file for the slow class.
    transformers.T5Tokenizer.from_pretrained = transformers.T5TokenizerFast.from_pretrained
    trained = describe_trained()
    steps = end_after(passes)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        result.write_text(json.dumps({"steps": steps, "trained": trained}, indent=1) + "\n", encoding="utf-8")


def return_one_index() -> None:
    """Let ``nonzero`` on the GPU, where all values are zeros, return one index after its kernels: a timestep in a schedule."""
    nonzero = torch.Tensor.nonzero

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        indices = nonzero(self, *args, **kwargs)
        return self.new_empty(1, self.dim(), dtype=torch.long) if self.is_cuda else indices

    torch.Tensor.nonzero = replacement


def describe_trained() -> dict[str, Any]:
    """Return a dictionary that gets the number, elements and types of the optimizer's tensors at its first step."""
    trained: dict[str, Any] = {}

    def describe(optimizer: Any, args: Any, kwargs: Any) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        trained["tensors"] = len(tensors)
        trained["elements"] = sum(tensor.numel() for tensor in tensors)
        trained["types"] = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        handle.remove()

    handle = register_optimizer_step_pre_hook(describe)
    return trained


if __name__ == "__main__":
    main()
