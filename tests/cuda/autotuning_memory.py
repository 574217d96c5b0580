"""Memory that a compiled block reserves in its first step on the virtual GPU, which times its kernels, and in a later one.

Prints the number of kernels that were timed and both sizes in bytes as JSON: with inductor's own timing, with that of compiled
blocks, with that in the memory pool of CUDA graphs, and with that on a GPU whose memory is all reserved.
"""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from kohya_ext.compiling.configuration import autotune_in_own_memory
from kohya_ext.compiling.cuda_recorder import CudaRecorder
from kohya_ext.config.settings import Settings
from kohya_ext.patching.attributes import replaced
from tests.cuda.generated_code import LENGTH, WIDTH, rotated

TIMING = "benchmark_all_configs"


#: Bytes that the process may use on a full GPU. Each timing takes 256 MiB of them in torch 2.6.
FULL = 2**30


def reserved(step: Callable[[], None]) -> int:
    """Return the bytes that a step leaves reserved if nothing unused was reserved before it."""
    torch.cuda.empty_cache()
    step()
    return torch.cuda.memory_reserved()


def sizes(
    timing: Callable[..., Any], place: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> tuple[int, int, int]:
    """Return the number of timed kernels, and the bytes reserved in the first step and in a later one, run in ``place()``."""
    timed = []

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        timed.append(kernel)
        return timing(kernel, *args, **kwargs)

    x = torch.zeros(1, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.zeros(WIDTH, 3 * WIDTH, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.zeros(LENGTH, WIDTH)

    def run(block: Callable[..., torch.Tensor]) -> None:
        with place():
            block(x, weights, angles).sum().backward()
            x.grad = weights.grad = None

    torch._dynamo.reset()
    run(rotated)  # leaves cuBLAS's workspaces
    compiled = torch.compile(rotated, fullgraph=True)
    with replaced(CachingAutotuner, TIMING, counted):
        first, later = (reserved(lambda: run(compiled)) for _ in range(2))
    return len(timed), first, later


def on_a_full_gpu(timing: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``timing`` after all memory of the process was reserved."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_per_process_memory_fraction(FULL / torch.cuda.get_device_properties(0).total_memory)
        block = 2**25
        blocks = []
        while FULL - torch.cuda.memory_reserved() >= block:
            blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))  # also in autograd's thread
        del blocks
        return timing(*args, **kwargs)

    return timed


if __name__ == "__main__":
    torch.set_default_device("cuda")
    torch._inductor.config.force_disable_caches = True
    own = getattr(CachingAutotuner, TIMING)
    apart = autotune_in_own_memory(own, Settings())
    recorder = CudaRecorder(torch.device("cuda"))
    print(json.dumps([sizes(own), sizes(apart), sizes(apart, recorder.in_pool), sizes(on_a_full_gpu(apart))]))
