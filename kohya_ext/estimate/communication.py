"""Bytes that the processes of a run exchange in an optimizer step, and their seconds. Nothing here imports torch.

The bytes are counted in real runs (``pytest tests/real/test_communication.py``). The seconds are predictions from bandwidths
that others have published: this project has run on no two GPUs.

- **LoRA scripts** average each gradient by itself after backward, where nothing hides it, once per optimizer step.
- **DistributedDataParallel** (full fine-tunes) averages gradients in buckets of 25 MiB during backward, of every micro-batch.
  Upstream accumulates the models that it has before they are wrapped, so that ``no_sync`` never holds the averaging back.
- **ZeRO-1 and 2** average whole gradients with all-reduce, although each process keeps its part only, and then gather the
  updated weights. DeepSpeed 0.19 uses no reduce-scatter here (``use_multi_rank_bucket_allreduce``) and overlaps nothing
  (``overlap_comm`` is off below stage 3). ZeRO-1 averages once per optimizer step, ZeRO-2 in every micro-batch.
- **ZeRO-3** gathers all weights, frozen ones too, for the forward and again for the backward of every micro-batch, except those
  that are needed again within ``stage3_max_reuse_distance`` weights. A checkpointed block is recomputed and differentiated with
  one gathering. Gradients are reduce-scattered in every micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

#: Operations, by the names that NCCL's documentation has for them.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"

#: DistributedDataParallel's bucket_cap_mb, and DeepSpeed's reduce_bucket_size in elements. Upstream sets neither.
_DDP_BUCKET = 25 * 2**20
_ZERO_BUCKET = 500_000_000

#: DeepSpeed's stage3_max_reuse_distance: weights that pass by before a gathered one is used again.
_REUSE_DISTANCE = 1_000_000_000

#: Share of backward in a step's computation: it takes twice as long as forward.
_BACKWARD = 2 / 3

#: Bytes of host memory that DeepSpeed's CPU AdamW moves for a weight: it reads weight, gradient and two moments in fp32, and
#: writes weight and moments, and a copy of the weight in bf16.
_CPU_ADAM_BYTES = 4 * 4 + 3 * 4 + 2

HOST_BANDWIDTH = 45e9
"""Bytes per second that CPU AdamW reaches in host memory, with two channels of DDR4 or DDR5: an assumption. On the two
processors of a DGX-2 it was 136e9: 0.22 s for 1e9 weights (ZeRO-Offload, https://arxiv.org/abs/2101.06840, table 4,
recalled)."""


class Engine(Enum):
    """What averages the gradients."""

    LORA = "LoRA"
    """The LoRA scripts' own averaging, tensor by tensor after backward."""
    DDP = "DistributedDataParallel"
    ZERO_1 = "ZeRO-1"
    ZERO_2 = "ZeRO-2"
    ZERO_3 = "ZeRO-3"


@dataclass(frozen=True)
class Exchange:
    """The tensors that an optimizer step exchanges, and the processes."""

    engine: Engine
    trained: int
    """Weights that get gradients. A LoRA of SDXL's text encoders has some that get none: those of each last layer."""
    tensors: int
    """Tensors of these weights."""
    processes: int
    """On all machines, one for each GPU."""
    machines: int = 1
    all_weights: int = 0
    """Weights of the trained and frozen models that DeepSpeed prepares; only ZeRO-3 gathers them."""
    gradient_bytes: int = 4
    """Bytes of a gradient that is sent: 4 with DistributedDataParallel and fp32 weights, 2 with ``--full_bf16``, with DeepSpeed
    and ``--mixed_precision bf16``, or with ``--ddp_gradient_compression bf16``."""
    weight_bytes: int = 2
    """Bytes of a weight that DeepSpeed gathers: 2 with ``--mixed_precision bf16``."""
    micro_batches: int = 1
    """``--gradient_accumulation_steps``."""
    checkpointing: bool = True
    """Whether blocks are recomputed in backward: their weights then count twice on the way to their next use."""
    averages_once: bool = False
    """Whether DistributedDataParallel averages after the last micro-batch only, and a LoRA in buckets (``--ddp_average_once``).
    ``--ddp_gradient_compression`` averages a LoRA in buckets, too."""
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    reuse_distance: int = _REUSE_DISTANCE


@dataclass(frozen=True)
class Collective:
    """Collective operations of one kind in an optimizer step."""

    operation: str
    bytes: float
    """Of the whole tensors, of all operations: the input of an all-reduce or reduce-scatter, the output of an all-gather."""
    count: int
    """Number of operations, at least."""
    overlaps: bool
    """Whether computation may continue meanwhile."""

    def sent(self, processes: int) -> float:
        """Return the bytes that each GPU sends, and receives, in a ring of that many processes.

        Formulas: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        passes = 2 if self.operation == ALL_REDUCE else 1
        return passes * self.bytes * (processes - 1) / processes


def collectives(run: Exchange) -> tuple[Collective, ...]:
    """Return the collective operations of an optimizer step; none for one process.

    Left out are operations of a few bytes: one number for logging, safe stop and gradient norms, and buffers of the models.
    """
    if run.processes == 1:
        return ()
    gradients = run.trained * run.gradient_bytes
    weights = run.trained * run.weight_bytes
    buckets = math.ceil(run.trained / _ZERO_BUCKET)
    each = run.micro_batches
    ddp_buckets = math.ceil(gradients / _DDP_BUCKET)
    if run.engine is Engine.LORA:
        return (Collective(ALL_REDUCE, gradients, ddp_buckets if run.averages_once else run.tensors, overlaps=False),)
    if run.engine is Engine.DDP:
        times = 1 if run.averages_once else each
        return (Collective(ALL_REDUCE, times * gradients, times * ddp_buckets, overlaps=True),)
    if run.engine is Engine.ZERO_3:
        gathered = (run.all_weights + _gathered_again(run)) * run.weight_bytes
        return (
            Collective(ALL_GATHER, each * gathered, each * run.tensors, overlaps=True),
            Collective(REDUCE_SCATTER, each * gradients, each * buckets, overlaps=True),
        )
    times = 1 if run.engine is Engine.ZERO_1 else each
    return (
        Collective(ALL_REDUCE, times * gradients, times * buckets, overlaps=False),
        Collective(ALL_GATHER, weights, buckets, overlaps=False),
    )


def _gathered_again(run: Exchange) -> int:
    """Return the weights that ZeRO-3 gathers for the backward, too.

    The last weights of the forward stay: between the uses of a weight the ones after it pass in forward and in backward, where
    recomputation counts them once more.
    """
    passes = 3 if run.checkpointing else 2
    return max(run.all_weights - run.reuse_distance // passes, 0)


@dataclass(frozen=True)
class Link:
    """A connection between GPUs, or between machines."""

    name: str
    bandwidth: float
    """Bus bandwidth that NCCL's collectives reach with large tensors: bytes per second in each direction, of each GPU, or of
    the network adapter of a machine."""
    latency: float
    """Seconds of a small all-reduce."""
    source: str


_GIST = "https://gist.github.com/muellerzr/fbfabd0fc02ac259f0a47d6a51b36d0e"
_GUIDE = "https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md"
_TCP = "https://github.com/NVIDIA/nccl/issues/209"

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        # GeForce GPUs without NVLink have no peer-to-peer access (https://github.com/tinygrad/open-gpu-kernel-modules), so
        # that NCCL copies through host memory.
        Link("PCIe 3, host memory", 4.2e9, 40e-6, "assumption: half of PCIe 4"),
        Link("PCIe 4, host memory", 8.4e9, 40e-6, f"copies between two RTX 4090 in both directions: {_GIST}"),
        Link("PCIe 4", 20e9, 40e-6, "A100 without NVLink: https://github.com/NVIDIA/nccl-tests/issues/178"),
        Link("PCIe 5", 28e9, 40e-6, "eight RTX 5090: https://github.com/NVIDIA/nccl/issues/1639"),
        Link("NVLink RTX 3090", 45e9, 15e-6, f"80% of the data sheet's 56.25 GB/s, as other NVLinks reach: {_GUIDE}"),
        Link("NVLink A100", 235e9, 15e-6, f"eight A100: {_GUIDE}"),
        Link("NVLink H100", 360e9, 15e-6, f"eight H200 without NVLS: {_GUIDE}"),
        Link("10 Gb network", 0.75e9, 160e-6, f"60% of the wire with TCP: {_TCP}"),
        Link("25 Gb network", 1.9e9, 160e-6, f"60% of the wire with TCP: {_TCP}"),
        Link("100 Gb network", 7.5e9, 160e-6, "60% of the wire: https://github.com/NVIDIA/nccl-tests/issues/22"),
    )
}


@dataclass(frozen=True)
class Cost:
    """What an optimizer step costs each GPU in addition to computation."""

    sent: Mapping[str, float]
    """Operation -> bytes that each GPU sends. It receives as many."""
    exposed: float
    """Seconds of collective operations that nothing hides."""
    overlapping: float
    """Seconds of collective operations during forward and backward, which computation may hide."""
    copied: float
    """Bytes between GPU and host for offloading, in both directions together."""
    host: float
    """Seconds of these copies and of the optimizer on the processor, in which the GPU waits."""

    @property
    def total_sent(self) -> float:
        """Bytes that each GPU sends in an optimizer step, and receives."""
        return sum(self.sent.values())

    def seconds(self, computation: float) -> tuple[float, float]:
        """Return the seconds of a step, at best and at worst, whose computation takes ``computation`` seconds on one GPU.

        At best all that may overlap does, with two thirds of the computation: backward. At worst nothing does. These are
        assumptions. Kernels of collectives slow computation down, and the last bucket never overlaps; on the other hand
        ZeRO-3 also overlaps with forward.
        """
        fixed = computation + self.exposed + self.host
        return fixed + max(self.overlapping - _BACKWARD * computation, 0.0), fixed + self.overlapping


def cost(
    run: Exchange, inside: Link, between: Link | None = None, bus: float = 24e9, host_bandwidth: float = HOST_BANDWIDTH
) -> Cost:
    """Return the cost of an optimizer step.

    ``inside``: the link between the GPUs of a machine, ``between``: the link between machines, needed for several. ``bus``:
    bytes per second between a GPU and its host, in one direction.
    """
    operations = collectives(run)
    seconds = {True: 0.0, False: 0.0}
    for operation in operations:
        seconds[operation.overlaps] += _seconds(operation, run, inside, between)
    copied, weights = _offloaded(run)
    return Cost(
        sent={operation.operation: operation.sent(run.processes) for operation in operations},
        exposed=seconds[False],
        overlapping=seconds[True],
        copied=copied,
        host=copied / bus + weights * _CPU_ADAM_BYTES * run.processes / run.machines / host_bandwidth,
    )


def _seconds(operation: Collective, run: Exchange, inside: Link, between: Link | None) -> float:
    if run.machines == 1:
        return operation.sent(run.processes) / inside.bandwidth + operation.count * inside.latency
    if between is None:
        raise ValueError("several machines need the link between them")
    across = operation.sent(run.processes)
    if operation.operation == ALL_REDUCE and run.machines == 2:
        across /= 2  # NCCL's tree between two machines: https://github.com/NVIDIA/nccl-tests/issues/22
    slowest = max(across / between.bandwidth, operation.sent(run.processes) / inside.bandwidth)
    return slowest + operation.count * between.latency


def _offloaded(run: Exchange) -> tuple[float, float]:
    """Return the bytes that are copied between a GPU and its host, and the weights that its process steps on the host.

    Each process copies its part of the gradients in fp32 before the step, and its part of the weights after it. With several
    micro-batches DeepSpeed adds the gradients of each on the GPU and copies the sum to the host and back.
    """
    if not run.offloads_optimizer:
        return 0.0, 0.0
    part = run.trained / run.processes
    sums = 2 * run.micro_batches - 1 if run.micro_batches > 1 else 0
    copied = part * (4 + run.weight_bytes + sums * run.gradient_bytes)
    if run.offloads_weights:  # each process copies its part to the GPU before each gathering
        copied += run.micro_batches * (run.all_weights + _gathered_again(run)) * run.weight_bytes / run.processes
    return copied, part
