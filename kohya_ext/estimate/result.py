"""The predicted memory of a run. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Bytes of GPU memory outside tensors: the CUDA context with its kernels, and the workspaces of cuBLAS and cuDNN. A rounded
#: value for recent GPUs and torch 2.x; a virtual GPU has no context to measure.
CONTEXT_BYTES = 600_000_000

#: NCCL's buffers and kernels for communication with other GPUs. An assumption: none could be measured.
COMMUNICATION_BYTES = 400_000_000

#: The driver's memory for a kernel of a CUDA graph. An assumption: one H100 with driver 580 used 5.4 to 8.7 KB for each of its
#: kernels, which are fewer than estimates count (benchmarks/README.md). Old drivers use up to 64 KiB.
BYTES_PER_RECORDED_KERNEL = 6_000


@dataclass(frozen=True)
class Estimate:
    """Memory in bytes and work of a run."""

    config: Mapping[str, Any]
    """:meth:`MemoryConfig.key` of the normalized configuration; for other scripts, the options that messages need."""
    allocated: int
    """Peak of allocated tensors, ``torch.cuda.max_memory_allocated``, in the phase that reserves the most."""
    reserved: int
    """Peak of the caching allocator's segments, ``torch.cuda.max_memory_reserved``."""
    minimum_reserved: int
    """Smallest reserve that still holds the tensors, to 32 MiB: a full GPU gets its unused segments back. Not reached under
    Windows and WSL, where the driver takes system memory instead, many times slower."""
    peak_phase: str
    """Phase of the peak: forward, backward, optimizer step, caching latents, caching text encoder outputs or sampling."""
    parts: Mapping[str, int]
    """Allocated bytes at the peak by purpose; they add up to ``allocated``."""
    phase_peaks: Mapping[str, int]
    """Peak of allocated tensors in each phase."""
    flops: int
    """Floating-point operations of one optimizer step; a multiply-add counts as two."""
    trainable_parameters: int
    versions: Mapping[str, str]
    """Versions of kohya_ext, sd-scripts and torch behind the estimate."""
    layout: str
    """The sd-scripts generation behind the estimate."""
    work: Mapping[str, Any] | None = None
    """The step's kernels, as :meth:`kohya_ext.estimate.seconds.Work.as_row`; None in rows from before they were counted."""
    trained_tensors: int = 0
    """Tensors of the trainable parameters; 0 in rows from before they were counted."""
    host: Mapping[str, int] = field(default_factory=dict)
    """Bytes of DeepSpeed's state in host memory in each process, by purpose."""
    recorded_kernels: int = 0
    """Kernels that ``--cuda_graphs`` records for one image size."""
    left_out: list[str] = field(default_factory=list)
    """What the run does and its dry run does not: ``--torch_compile``."""
    missing: str = ""
    """The kind of checkpoint of which the usual one was assumed; empty if the run's own files were read."""

    @property
    def total(self) -> int:
        """Reserved memory, CUDA context, NCCL, and recordings of one image size: what ``nvidia-smi`` shows for the process."""
        return self.reserved + CONTEXT_BYTES + self.recordings + self.communication

    @property
    def communication(self) -> int:
        """NCCL's memory in bytes; 0 for one process."""
        return COMMUNICATION_BYTES if (self.config.get("num_processes") or 1) > 1 else 0

    @property
    def recordings(self) -> int:
        """The driver's memory for the recordings of one image size, in bytes."""
        return self.recorded_kernels * BYTES_PER_RECORDED_KERNEL

    @property
    def flops_per_image(self) -> float:
        """Floating-point operations for one image: a measure of speed that needs no GPU."""
        return float(self.flops / self.images)

    @property
    def images(self) -> int:
        """Images of one optimizer step of :attr:`config`."""
        return int(self.config.get("train_batch_size", 1)) * int(self.config.get("gradient_accumulation_steps", 1))
