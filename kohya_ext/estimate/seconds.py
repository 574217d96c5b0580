"""Seconds of a training step on a GPU, from its counted kernels. Nothing here imports torch.

The GPU runs kernels one after another while the host launches the next ones, and blocks are copied over the bus meanwhile. So
a step takes about as long as the slowest of the three, and somewhat longer where two are alike:
``(gpu**p + host**p + bus**p) ** (1 / p)``. An optimizer's waits for the GPU come on top: neither works ahead then.

The constants were fitted by ``python -m benchmarks.step_seconds``, which prints the errors on the figures behind them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kohya_ext.estimate.gpus import FP8, INT8, SIXTEEN_BITS, WINDOWS, Gpu

#: Kinds of kernels that are not matrix products; those are named by their operands' type: 16 bits, fp32, fp8, int8. A rotation
#: is a 16-bit product within another kernel, so its count is 0. So is the count of a LoRA's products within one.
MEMORY, CONVOLUTION, ATTENTION, MASKED_ATTENTION = "memory", "convolution", "attention", "masked attention"
ROTATION = "rotation"


@dataclass(frozen=True)
class Kernels:
    """Kernels of one kind and of similar size."""

    kind: str
    count: int
    flops: float
    """FLOPs of all of them."""
    bytes: float
    """Bytes that all of them read and write."""


@dataclass(frozen=True)
class Work:
    """The kernels of one optimizer step."""

    batch: Sequence[Kernels]
    """Forward, recomputation and backward of one micro-batch."""
    optimizer: Sequence[Kernels]
    from_python: int = 0
    """Kernels of ``batch`` that forward and recomputation launch operator by operator. Autograd's engine and compiled code
    launch the others, at less cost to the host."""
    copied: float = 0
    """Bytes that one micro-batch copies from the host to the GPU: swapped blocks."""
    returned: float = 0
    """Bytes that it copies back. As many come from pageable memory, and the rest from page-locked (one_way_block_swap)."""
    waits: int = 0
    """How often the optimizer makes the host wait for the GPU."""

    def as_row(self) -> dict[str, Any]:
        """Return the same as JSON, rounded to four digits: FLOPs in 1e9, bytes in 1e6."""
        parts = {"batch": self.batch, "optimizer": self.optimizer}
        rows = {
            name: [[group.kind, group.count, _rounded(group.flops / 1e9), _rounded(group.bytes / 1e6)] for group in groups]
            for name, groups in parts.items()
        }
        copies = {name: _rounded(size / 1e6) for name, size in (("copied", self.copied), ("returned", self.returned))}
        return {**rows, "from_python": self.from_python, **copies, "waits": self.waits}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Work:
        """Return the work of :meth:`as_row`'s JSON."""
        batch, optimizer = (
            [Kernels(kind, count, flops * 1e9, size * 1e6) for kind, count, flops, size in row[name]]
            for name in ("batch", "optimizer")
        )
        return cls(batch, optimizer, row["from_python"], row["copied"] * 1e6, row["returned"] * 1e6, row["waits"])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Constants:
    """What a step reaches of a GPU's rates, and what a launch costs the host."""

    product: float = 0.75
    """Fraction of the GPU's rate that a large matrix product reaches."""
    geforce: float = 1.07
    """The same of a GeForce relative to other GPUs: its clock is above the data sheet's, theirs below."""
    recent: float = 1.33
    """The same of Ada and Blackwell, with convolutions and attention, relative to earlier GPUs: they sustain their data sheet's
    rate."""
    int8: float = 0.64
    """The fraction of its own rate that an int8 product reaches, relative to a 16-bit product. This one, ``fp8`` and
    ``rotation`` are those of an H100's large products (benchmarks/results/gpu_base_weights.json)."""
    geforce_int8: float = 1.25
    """The same of a GeForce relative to an H100, whose matrix units Triton uses less well. On an RTX 3090 Triton's products are
    2.8 to 4.2 times as fast as 16-bit ones, of at most 4 times the rate: https://arxiv.org/abs/2606.14598."""
    fp8: float = 0.93
    """The same of torch's fp8 product. Where torch has none, Triton's is assumed to reach what its int8 product reaches."""
    rotation: float = 0.17
    """Fraction of the GPU's 16-bit rate that rotations reach within their kernels, which do little else meanwhile."""
    geforce_rotation: float = 2.0
    """The same of a GeForce relative to an H100: an assumption, since small products use all of a GeForce's matrix units."""
    convolution: float = 0.39
    attention: float = 0.40
    geforce_attention: float = 1.8
    """The attention of a GeForce relative to other GPUs, whose products are faster than the rest of the kernel."""
    turing_attention: float = 0.38
    """The attention of Turing relative to later GPUs: PyTorch has no flash attention for it."""
    masked_attention: float = 0.25
    """The speed of attention with a mask relative to that without. PyTorch has no flash attention for it. Turing has none
    at all, so there it is 1."""
    hopper_masked_attention: float = 0.58
    """The same on Hopper, where PyTorch uses cuDNN's attention."""
    bandwidth: float = 0.855
    """Fraction of the memory's bandwidth that a kernel without FLOPs reaches."""
    cached: float = 2.45
    """Bandwidth of kernels whose tensors fit the L2 cache, relative to the memory's."""
    cache_fraction: float = 0.4
    """Fraction of the L2 cache that holds a kernel's tensors."""
    kernel: float = 3.2e-6
    """Seconds of a kernel beyond its work: it starts, waits for the one before, and fills the GPU."""
    product_kernel: float = 4.15e-6
    attention_kernel: float = 11.5e-6
    gap: float = 2.0e-6
    """Seconds between two kernels, in which the GPU is not busy."""
    launch: float = 26.9e-6
    """Seconds of the host for one kernel of forward or recomputation: Python, autograd and the driver."""
    engine_launch: float = 0.4
    """The same for a kernel that autograd's engine or compiled code launches, relative to ``launch``. On the virtual GPU it is
    0.26; the driver, which costs nothing there, adds some 3 microseconds to each of both."""
    optimizer_launch: float = 6.9e-6
    """Seconds of the host for one kernel of the optimizer, without autograd and modules."""
    wait: float = 14.8e-6
    """Seconds of a wait for the GPU in the optimizer: until the host knows, and until the GPU has work again."""
    windows_wait: float = 340e-6
    """The same under Windows, whose driver collects launches before it gives them to the GPU."""
    pageable_to_gpu: float = 7.3e9
    """Bytes per second from memory of the host that is not page-locked: an H100's host (benchmarks/results/gpu_rates.json)."""
    pageable_to_host: float = 12.5e9
    """The same in the other direction."""
    replay: float = 10e-3
    """Seconds of the host for one micro-batch with CUDA graphs."""
    power: float = 4.0
    """The exponent that combines GPU, host and bus."""


CONSTANTS = Constants()


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds of one optimizer step."""

    seconds: float
    parts: Mapping[str, float]
    """Seconds of ``host`` with its waits, ``arithmetic``, ``memory`` and ``bus``, if nothing else limited the step."""
    factor: float
    """The range is from ``seconds / factor`` to ``seconds * factor``, with nine in ten published figures of sd-scripts."""

    @property
    def limit(self) -> str:
        """What limits the step: ``host``, ``arithmetic``, ``memory`` or ``bus``."""
        gpu = self.parts["arithmetic"] + self.parts["memory"]
        whole = max(("host", self.parts["host"]), ("bus", self.parts["bus"]), ("gpu", gpu), key=lambda part: part[1])[0]
        return whole if whole != "gpu" else max(("arithmetic", "memory"), key=lambda part: self.parts[part])


def predict(work: Work, gpu: Gpu, micro_batches: int = 1, graphs: bool = False, constants: Constants = CONSTANTS) -> Prediction:
    """Return the predicted time of a step with ``micro_batches`` of gradient accumulation, replayed from CUDA graphs or not."""
    kinds = by_kind(work, gpu, micro_batches, constants)
    moving = kinds.pop(MEMORY, 0.0)
    parts = {"arithmetic": sum(kinds.values()), "memory": moving}
    from_engine = sum(group.count for group in work.batch) - work.from_python
    launches = constants.launch * (work.from_python + constants.engine_launch * from_engine)
    batch = constants.replay if graphs else launches
    updates = sum(group.count for group in work.optimizer)
    waits = work.waits * (constants.windows_wait if gpu.host == WINDOWS else constants.wait)
    host = gpu.launch * (micro_batches * batch + constants.optimizer_launch * updates)
    parts["bus"] = micro_batches * bus_seconds(work, gpu.bus, constants)
    parts["host"] = host + waits
    together = (parts["arithmetic"] + parts["memory"], host, parts["bus"])
    seconds = sum(part**constants.power for part in together) ** (1 / constants.power) + waits
    return Prediction(seconds, parts, _factor((together[0], parts["host"], parts["bus"]), gpu, constants.power))


def bus_seconds(work: Work, bus: float, constants: Constants = CONSTANTS) -> float:
    """Return the seconds that a micro-batch's copies take by themselves, on a bus of so many bytes per second."""
    to_host, to_gpu = min(bus, constants.pageable_to_host), min(bus, constants.pageable_to_gpu)
    pageable = min(work.copied, work.returned)
    return work.returned / to_host + pageable / to_gpu + (work.copied - pageable) / bus


def by_kind(work: Work, gpu: Gpu, micro_batches: int = 1, constants: Constants = CONSTANTS) -> dict[str, float]:
    """Return the seconds of a step's kernels on the GPU by their kind, with the gaps after them."""
    constants = _of(gpu, constants)
    kinds: dict[str, float] = {}
    for groups, times in ((work.batch, micro_batches), (work.optimizer, 1)):
        for group in groups:
            each = _kernel_seconds(group, gpu, constants) + group.count * constants.gap
            kinds[group.kind] = kinds.get(group.kind, 0.0) + times * each
    return kinds


def _of(gpu: Gpu, constants: Constants) -> Constants:
    """Return the constants with the fractions of its rates that a GPU reaches."""
    product = constants.product
    if gpu.architecture in ("Turing", "7.5"):
        constants = replace(constants, attention=constants.attention * constants.turing_attention, masked_attention=1.0)
    if gpu.architecture in ("Ada", "Blackwell", "8.9", "12.0"):
        constants = replace(
            constants,
            product=constants.product * constants.recent,
            convolution=constants.convolution * constants.recent,
            attention=constants.attention * constants.recent,
        )
    if gpu.is_geforce:
        constants = replace(
            constants,
            product=constants.product * constants.geforce,
            attention=constants.attention * constants.geforce_attention,
            int8=constants.int8 * constants.geforce_int8,
            rotation=constants.rotation * constants.geforce_rotation,
        )
    if gpu.multiplies_fp8_with_triton:
        constants = replace(constants, fp8=constants.int8)
    if gpu.measured:  # its rates are those that products reach, so what they reach of the data sheet's is in them
        reached = constants.product / product
        constants = replace(
            constants,
            product=product,
            convolution=constants.convolution / reached,
            attention=constants.attention / reached,
            rotation=constants.rotation / reached,
            int8=1.0,
            fp8=1.0,
        )
    return constants


def _kernel_seconds(group: Kernels, gpu: Gpu, constants: Constants) -> float:
    """Return the seconds of kernels of one kind on the GPU."""
    cached = group.bytes < constants.cache_fraction * gpu.cache * group.count
    reached = constants.bandwidth * (constants.cached if cached else 1)
    moving = group.bytes / (reached * gpu.bandwidth)
    if group.kind == MEMORY:
        return moving + group.count * constants.kernel
    if group.kind == ROTATION:
        return group.flops / (constants.rotation * gpu.rates[SIXTEEN_BITS])
    if group.kind == CONVOLUTION:
        efficiency, each = constants.convolution, constants.kernel
    elif group.kind == ATTENTION:
        efficiency, each = constants.attention, constants.attention_kernel
    elif group.kind == MASKED_ATTENTION:
        is_hopper = gpu.architecture in ("Hopper", "9.0")
        relative = constants.hopper_masked_attention if is_hopper else constants.masked_attention
        efficiency, each = constants.attention * relative, constants.attention_kernel
    else:
        of_type = {INT8: constants.int8, FP8: constants.fp8}.get(group.kind, 1.0)
        efficiency, each = constants.product * of_type, constants.product_kernel
    rate = gpu.rates.get(group.kind, gpu.rates[SIXTEEN_BITS])
    return max(group.flops / (efficiency * rate), moving) + group.count * each


#: Factors of nine in ten errors: of the host, which differs most between computers, of it when measured, of the GPU, and of a
#: GPU whose rates are disputed or of an architecture with few published figures.
_HOST, _HOST_MEASURED, _GPU, _GPU_UNSURE = 2.0, 1.4, 1.4, 1.5


def _factor(together: Sequence[float], gpu: Gpu, power: float) -> float:
    """Return the factor of the range: between those of GPU and host, by how much each limits the step."""
    working, host, bus = (part**power for part in together)
    share = host / (working + host + bus)
    unsure = not gpu.measured and (gpu.checked == "disputed" or gpu.architecture == "Blackwell")
    of_gpu = math.log(_GPU_UNSURE if unsure else _GPU)
    of_host = math.log(_HOST_MEASURED if gpu.measured else _HOST)
    return math.exp(share * of_host + (1 - share) * of_gpu)
