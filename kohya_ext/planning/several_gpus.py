"""The fastest configuration of a run on several GPUs of one machine: its engine, what it moves to the host, and its batch.

Nothing here imports torch; a new estimate does (kohya_ext.dry_run.estimation).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine, quoted
from kohya_ext.dry_run import estimation
from kohya_ext.errors import UserError
from kohya_ext.estimate import communication, memory_config, step_time
from kohya_ext.estimate.communication import Engine, Exchange, Link
from kohya_ext.estimate.gpus import Gpu
from kohya_ext.estimate.result import CONTEXT_BYTES
from kohya_ext.planning.plan import Candidate, known_tiers
from kohya_ext.planning.tiers import fits, usable_bytes
from kohya_ext.preflight import deepspeed
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.constraints import stepping_in_backward
from kohya_ext.units import gigabytes, label

#: Fraction of the host's memory that a plan uses.
USABLE_HOST = 0.9


@dataclass(frozen=True)
class Machine:
    """The GPUs to plan for, and their host."""

    gpus: int
    card: int
    """Bytes of each GPU."""
    gpu: Gpu
    """Its rates."""
    host: int | None = None
    """Bytes of host memory; None if not known."""

    @property
    def link(self) -> Link:
        """How the GPUs exchange data, by the usual one for them: a bridge between RTX 3090 is not assumed."""
        name = self.gpu.name.lower()
        if "sxm" in name:
            return communication.LINKS["NVLink A100" if "a100" in name else "NVLink H100"]
        if self.gpu.is_geforce:
            by_bus = ((45e9, "PCIe 5"), (20e9, "PCIe 4, host memory"), (0, "PCIe 3, host memory"))
            return communication.LINKS[next(link for least, link in by_bus if self.gpu.bus >= least)]
        return communication.LINKS["PCIe 5" if self.gpu.bus >= 45e9 else "PCIe 4"]


@dataclass(frozen=True)
class _Choice:
    """An engine with its options."""

    name: str
    engine: Engine
    changes: dict[str, object]
    traded: str
    tier: str = preset_files.BASE
    """The preset that it is based on."""
    is_close: bool = True
    """Whether the trained weights are updated in fp32, or as the family's base preset does."""
    bytes_per_weight: Callable[[int], float] = lambda processes: 0.0
    """Number of processes -> the least that the training state takes on each GPU."""


_OFFLOAD = "copies gradients to the host and weights back in every step; AdamW runs on the processor"
_GATHERS = "gathers the weights for forward and backward of every batch; no sample images during training"

#: DistributedDataParallel with gradients that are in its buckets, not copied to them.
_DDP: dict[str, object] = {"ddp_gradient_as_bucket_view": True, "fused_backward_pass": False, "blocks_to_swap": 0}

#: The engines of full fine-tunes.
_CHOICES = (
    _Choice("DDP", Engine.DDP, _DDP, "no fused backward pass", bytes_per_weight=lambda processes: 8),
    _Choice("DDP, pure bf16", Engine.DDP, {**_DDP, "full_bf16": True},
            "no fused backward pass; weights are stored only in bf16, so very small updates are lost to rounding",
            is_close=False, bytes_per_weight=lambda processes: 4),
    _Choice("ZeRO-2", Engine.ZERO_2, {"zero_stage": 2}, "no fused backward pass", "zero3",
            bytes_per_weight=lambda processes: 2 + 20 / processes),
    _Choice("ZeRO-2, optimizer on the host", Engine.ZERO_2, {}, _OFFLOAD, "zero2-offload",
            bytes_per_weight=lambda processes: 2),
    _Choice("ZeRO-3", Engine.ZERO_3, {}, _GATHERS, "zero3", bytes_per_weight=lambda processes: 16 / processes),
    _Choice("ZeRO-3, optimizer on the host", Engine.ZERO_3, {"offload_optimizer_device": "cpu"}, f"{_GATHERS}; {_OFFLOAD}",
            "zero3", bytes_per_weight=lambda processes: 2 / processes),
    _Choice("ZeRO-3, all on the host", Engine.ZERO_3, {"offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
            f"{_GATHERS}, from the host; {_OFFLOAD}", "zero3"),
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """A configuration for several GPUs, with what it needs and takes."""

    candidate: Candidate
    engine: Engine
    machine: Machine
    is_close: bool = True

    @property
    def images(self) -> int:
        """Images of one optimizer step of all processes."""
        config = memory_config.read(self.candidate.command)[0]
        return self.machine.gpus * config.train_batch_size * config.gradient_accumulation_steps

    @property
    def host(self) -> int:
        """Bytes of training state in host memory, of all processes."""
        return self.machine.gpus * sum(self.candidate.estimate.host.values())

    @property
    def fits(self) -> bool:
        """Whether it fits the GPUs, and the host if that is known."""
        host = self.machine.host
        return fits(self.candidate.estimate, self.machine.card) and (host is None or self.host <= USABLE_HOST * host)

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of a step at best and at worst: communication hidden by computation as far as it can be, or not at all."""
        estimate = self.candidate.estimate
        time = step_time.predict(estimate, self.candidate.command, self.machine.gpu)
        if time is None:
            raise UserError(f"the time of {self.candidate.name} cannot be predicted on the {self.machine.gpu.name}")
        return communication.cost(_exchange(self), self.machine.link, bus=self.machine.gpu.bus).seconds(time.seconds)

    @property
    def seconds_per_image(self) -> float:
        """Between best and worst, for an image of all GPUs."""
        return sum(self.seconds) / 2 / self.images


def _exchange(option: Setup) -> Exchange:
    config = memory_config.read(option.candidate.command)[0]
    estimate = option.candidate.estimate
    settings = option.candidate.command.settings
    half = config.mixed_precision != "no" and (config.deepspeed or config.full_bf16)
    half |= config.family.finetune_in_16_bits and not config.trains_network
    return Exchange(
        option.engine,
        trained=estimate.trainable_parameters,
        tensors=estimate.trained_tensors,
        processes=option.machine.gpus,
        all_weights=estimate.trainable_parameters,
        gradient_bytes=2 if half or settings["ddp_gradient_compression"] else 4,
        micro_batches=config.gradient_accumulation_steps,
        checkpointing=config.gradient_checkpointing,
        averages_once=settings["ddp_average_once"],
        offloads_optimizer=config.offload_optimizer_device is not None,
        offloads_weights=config.offload_param_device is not None,
    )


@dataclass(frozen=True)
class SeveralPlan:
    """The fastest configuration for several GPUs, and the others."""

    machine: Machine
    answer: Setup
    """The fastest that fits and is close, on all GPUs or on one of them."""
    others: tuple[Setup, ...]
    """The others that fit, the fastest first; those that are not close last."""
    too_big: tuple[Setup, ...]
    wanted: int
    """Images per step of the command line on one GPU."""
    alone: Setup | None
    """The fastest shipped tier on one of the GPUs; None if none fits, or if its time is not known."""

    @property
    def together(self) -> Setup:
        """The best configuration on all GPUs."""
        return next(option for option in (self.answer, *self.others) if option is not self.alone)


def plan(checkout: Checkout, command: CommandLine, machine: Machine, announce: Callable[[str], None]) -> SeveralPlan:
    """Return the fastest configuration that fits.

    The user's options are kept, and so is the product of processes, batch size and accumulation. Configurations that update the
    weights in another precision than the family's base preset are an answer only if no other one fits. Raises UserError when
    nothing fits, or for arguments that cannot be estimated.
    """
    options = [*_options(checkout, command, machine, announce)]
    inside = [option for option in options if option.fits]
    outside = sorted((each for each in options if not each.fits), key=lambda each: each.candidate.estimate.reserved)
    candidate = next((each for each in known_tiers(checkout, command) if fits(each.estimate, machine.card)), None)
    if not inside:
        raise UserError(_reason(machine, outside, candidate))
    alone = _alone(candidate, machine)
    inside += [alone] if alone is not None else []
    answer, *others = sorted(inside, key=lambda each: (not each.is_close, each.seconds_per_image))
    return SeveralPlan(machine, answer, tuple(others), tuple(outside), _images(command), alone)


def _alone(candidate: Candidate | None, machine: Machine) -> Setup | None:
    """Return a configuration as an option for one of the GPUs; None without one, or if its time is not known."""
    if candidate is None or step_time.predict(candidate.estimate, candidate.command, machine.gpu) is None:
        return None
    config = memory_config.read(candidate.command)[0]
    base = preset_files.base(config.kind)
    usual = base is not None and "full_bf16" in base.values
    renamed = replace(candidate, name=f"one GPU, {candidate.name}")
    return Setup(renamed, Engine.LORA, replace(machine, gpus=1), is_close=usual or not config.full_bf16)


def _reason(machine: Machine, outside: list[Setup], alone: Candidate | None) -> str:
    """Return why nothing fits on all GPUs, with the way out."""
    line = [] if alone is None else ["python", "-m", "kohya_ext", alone.command.name, *alone.command.argv]
    way_out = f"; one of the GPUs trains it alone: {quoted(line)}" if line else ""
    if not outside:
        return (
            f"no engine for several GPUs works with these options: remove --fused_backward_pass and --blocks_to_swap{way_out}"
        )
    on_gpu = [option for option in outside if fits(option.candidate.estimate, machine.card)]
    if on_gpu:
        least = min(on_gpu, key=lambda option: option.host)
        return (
            f"{least.candidate.name} fits the GPUs, but needs {gigabytes(least.host)} GB of host memory, and the machine has "
            f"{gigabytes(machine.host or 0)} GB{way_out}"
        )
    return (
        f"nothing fits {machine.gpus} times the {label(machine.card)} less 5 percent; {outside[0].candidate.name} needs "
        f"{gigabytes(outside[0].candidate.estimate.total)} GB on each{way_out}"
    )


def _images(command: CommandLine) -> int:
    given = command.given
    return int(given.get("train_batch_size", 1)) * int(given.get("gradient_accumulation_steps", 1))


def _options(checkout: Checkout, command: CommandLine, machine: Machine, announce: Callable[[str], None]) -> Iterator[Setup]:
    """Yield the configurations that may fit, with their estimates."""
    family = memory_config.read(command.with_tier(None))[0].kind
    if family.endswith("-lora"):
        yield from _tiers(checkout, command, machine, announce)
        return
    weights = 0
    # The first one, which nearly always fits, tells the number of weights.
    for choice in reversed(_CHOICES):
        if weights * choice.bytes_per_weight(machine.gpus) + CONTEXT_BYTES > usable_bytes(machine.card):
            continue
        start = _start(checkout, command, choice, family, machine)
        if start is None:
            continue
        announce(f"estimate of {choice.name} (20 to 60 s if it is not known yet)")
        option = _with_batch(checkout, start, choice, machine)
        weights = option.candidate.estimate.trainable_parameters
        yield option


def _tiers(checkout: Checkout, command: CommandLine, machine: Machine, announce: Callable[[str], None]) -> Iterator[Setup]:
    """Yield tiers of a network with a process for each GPU, from the fastest that fits one GPU on, until one fits."""
    for tier in known_tiers(checkout, command):
        if not fits(tier.estimate, machine.card):
            continue
        announce(f"estimate of {tier.name} (20 to 60 s if it is not known yet)")
        option = _with_batch(
            checkout, _each(tier.command, machine), _Choice(f"DDP, {tier.name}", Engine.LORA, {}, tier.traded), machine
        )
        yield option
        if option.fits:
            return


def _start(checkout: Checkout, command: CommandLine, choice: _Choice, family: str, machine: Machine) -> CommandLine | None:
    """Return the command line of a choice; None if the user's options rule it out, or if it has no preset."""
    preset = preset_files.file_of(family, choice.tier)
    if preset is None:
        return None
    tiered = command.with_tier(f"{family}/{choice.tier}")
    changes = {key: value for key, value in choice.changes.items() if tiered.values.get(key, False) != value}
    if any(command.given.get(key, value) != value for key, value in changes.items()):
        return None
    changed = _each(tiered.with_({key: value for key, value in changes.items() if value or key in tiered.values}), machine)
    args = Namespace(**changed.values)
    steps_early = stepping_in_backward(args, changed.settings) is not None
    return None if steps_early or any(deepspeed.conflicts(checkout.script(command.name), args)) else changed


def _each(command: CommandLine, machine: Machine) -> CommandLine:
    return command.with_({"num_processes": machine.gpus})


def _with_batch(checkout: Checkout, command: CommandLine, choice: _Choice, machine: Machine) -> Setup:
    """Return a choice with the largest batch that fits, and accumulation for the others of its images."""
    images = max(_images(command) // machine.gpus, 1)
    for batch in (size for size in range(images, 0, -1) if images % size == 0):
        sizes: dict[str, object] = {"train_batch_size": batch, "gradient_accumulation_steps": images // batch}
        if choice.engine is Engine.DDP and images > batch:
            sizes["ddp_average_once"] = True
        sized = command.with_(sizes) if _images(command) > 1 else command
        candidate = Candidate(choice.name, sized, estimation.estimate(checkout, sized, timed=True), choice.traded)
        option = Setup(candidate, choice.engine, machine, choice.is_close)
        if option.fits or batch == 1:
            return option
    raise AssertionError("a batch of 1 is tried last")
