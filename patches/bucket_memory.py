"""Reserve one segment of GPU memory for the activations of all image sizes.

PyTorch's allocator gets memory in segments of the sizes that are asked for, and each image size asks for others. What one size
leaves free has gaps for the next, which gets more segments. If the first step has left gaps, unused segments are returned, and
one segment of the size of its activations is reserved. Later steps of any size divide it.

The segment is reserved again if it was returned, as before sample images. It is not after an out-of-memory error, nor with
settings of the allocator.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.gpu.spill import may_spill
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback, current_batch
from kohya_ext.patching.types import Accelerator

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with settings of PyTorch's allocator, some of which forbid dividing large segments."""

_GAPS = 1.02
"""Reserved bytes divided by the tensors' peak, above which a step has gaps."""

_LARGER = 1.1
"""Pixels of the largest batch divided by the first step's, above which the segment is larger than the first step's memory.
Buckets of one resolution differ by less, for which the gaps between other tensors are enough."""

_SMALLEST = 2**28
"""Bytes of activations below which a segment for them would not be worth the call."""

_SPARE = 0.05
"""Fraction of the GPU that stays free where the driver spills to host memory: windows and other programs need it too."""

_OWN_MEMORY = ("vram_budget", "cuda_graphs", "expandable_segments")
"""Options that change how the memory of steps is reserved."""


@dataclass
class _Segment(TrainingCallback):
    """The segment of one run."""

    device: int
    resident: int = 0
    """Bytes of tensors before the first step; 0 before it."""
    earlier: int = 0
    """The most bytes of tensors before the first step, as while latents were cached."""
    pixels: int = 0
    """Pixels of the largest micro-batch of the first step."""
    size: int = 0
    """Bytes of the segment; 0 before the first step has ended."""
    reserved: int = 0
    """Bytes in all segments after it was reserved."""
    ended: bool = False

    def before_batch(self, accelerator: Accelerator) -> None:
        """Measure the memory before the first step; reserve the segment again before a later one if it was returned."""
        if self.ended:
            return
        stats = self._stats()
        if self.size:
            if stats["reserved_bytes"]["all"]["current"] < self.reserved - self.size // 2:
                self._reserve(stats)
            return
        from kohya_ext.gpu.batch_sizes import image_sizes, pixels_of

        if not self.resident:
            allocated = stats["allocated_bytes"]["all"]
            self.resident, self.earlier = allocated["current"], allocated["peak"]
            self.ended = len(image_sizes(accelerator)) < 2
        self.pixels = max(self.pixels, pixels_of(current_batch(), accelerator))

    def after_batch(self, accelerator: Accelerator) -> None:
        """Reserve the segment after the first step if it has left gaps."""
        if self.ended or self.size or not accelerator.sync_gradients:
            return
        stats = self._stats()
        peak, reserved = stats["allocated_bytes"]["all"]["peak"], stats["reserved_bytes"]["all"]["current"]
        if reserved < peak * _GAPS:
            self.ended = True
            return
        self.size = self._needed(accelerator, peak, reserved - stats["allocated_bytes"]["all"]["current"])
        if self.size < _SMALLEST:
            self.ended = True
        else:
            self._reserve(stats)

    def _reserve(self, stats: Mapping[str, Any]) -> None:
        """Return unused segments, and reserve one, unless memory is short."""
        import torch

        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        spare = _SPARE * total if may_spill() else 0
        self.ended = stats["num_alloc_retries"] > 0 or self.size > free - spare
        if self.ended:
            return
        try:
            torch.empty(self.size, dtype=torch.uint8, device=f"cuda:{self.device}")
        except torch.OutOfMemoryError:  # a limit below the GPU's memory
            self.ended = True
        self.reserved = torch.cuda.memory_reserved(self.device)

    def _needed(self, accelerator: Accelerator, peak: int, unused: int) -> int:
        """Return the bytes that a step of the largest batch needs: as the first, or ``unused`` if its peak is not known."""
        from kohya_ext.gpu.batch_sizes import largest_batch

        needed = peak - self.resident if peak > self.earlier else unused
        larger = largest_batch(accelerator) / self.pixels if self.pixels else 1.0
        return int(needed * larger) if larger > _LARGER else needed

    def _stats(self) -> Mapping[str, Any]:
        """Return the allocator's counters, which it keeps on the host."""
        import torch

        stats: Mapping[str, Any] = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Segment | None:
    from kohya_ext.units import index_of

    if accelerator.device.type != "cuda" or any(map(os.environ.get, _SETTINGS)) or any(settings[name] for name in _OWN_MEMORY):
        return None
    return _Segment(index_of(accelerator.device))


PATCH = Patch(
    name="bucket_memory",
    summary="reserve one segment of GPU memory for the activations of all image sizes",
    targets=(),
    exactness="exact",
    held_to="the same run without it",
    idea="https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp",
    stage=Stage.OBSERVE,
    on_start=_start,
)
