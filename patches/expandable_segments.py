"""Let PyTorch's allocator extend its segments instead of adding new ones (``--expandable_segments``).

Tensors of changing sizes, as of images of several bucket sizes, leave gaps in segments of fixed size. A segment that expands is
one range of addresses, to which memory is added in pages of 20 MiB.
"""

from __future__ import annotations

import os
import platform
from argparse import Namespace

from kohya_ext.config.settings import Option, Settings, boolean
from kohya_ext.console import warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator

EXPANDABLE_SEGMENTS = Option(
    "expandable_segments",
    False,
    boolean,
    "let PyTorch's memory segments grow instead of adding new ones, which reserves less GPU memory with several image sizes "
    "(Linux; experimental in PyTorch)",
)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
    if accelerator.device.type != "cuda":
        return
    if platform.system() == "Windows":
        warn("--expandable_segments does nothing on Windows, where PyTorch has no expandable segments; remove it")
        return
    import torch

    # PyTorch resets every setting that is not named, also those of the environment.
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    torch.cuda.memory._set_allocator_settings(",".join(filter(None, (given, "expandable_segments:True"))))


PATCH = Patch(
    name="expandable_segments",
    summary="let PyTorch's memory segments grow instead of adding new ones, which reserves less GPU memory",
    targets=(),
    options=(EXPANDABLE_SEGMENTS,),
    exactness="exact",
    held_to="the same run without it",
    idea="https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    wanted=lambda settings: settings[EXPANDABLE_SEGMENTS],
    stage=Stage.COMPUTE,
    on_start=_start,
)
