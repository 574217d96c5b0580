"""Measure one run on fake tensors: the script's own parser and trainer, and one step."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_ext import __version__
from kohya_ext.config.arguments import find_problem, find_problems, take_over
from kohya_ext.config.command_line import CommandLine, launcher_options
from kohya_ext.config.settings import Settings, options
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config
from kohya_ext.estimate.memory_config import MemoryConfig, UnknownRunError
from kohya_ext.estimate.read_values import Recorded, same_for
from kohya_ext.estimate.result import Estimate
from kohya_ext.patching.patch import Patcher, registry
from kohya_ext.patching.types import NetworkTrainer
from kohya_ext.preflight import deepspeed
from kohya_ext.quantization.selection import reason_to_refuse
from kohya_ext.sdscripts.checkouts import PINNED_VERSION, Checkout
from kohya_ext.sdscripts.introspect import importable, script_names

if TYPE_CHECKING:
    from kohya_ext.estimate.activation_budgets import Graph


def measure(checkout: Checkout, command: CommandLine) -> Estimate:
    """Return the estimate of a command line, with the patches that its run would have.

    Raises UserError for arguments the script does not take, and for a run that cannot be estimated.
    """
    config = memory_config.read(command)[0]
    _check_supported(config)
    with _prepared(checkout, tracing(command.settings, memory_config.normalized(config))) as patcher:
        return _measure_step(checkout, patcher, *read(checkout, command))


def measure_budgets(checkout: Checkout, command: CommandLine) -> list[Graph]:
    """Return the cost of each compiled block of a command line by activation memory budget, without checkpointing.

    Raises UserError as :func:`measure` does, and for a model without compiled blocks.
    """
    from kohya_ext.compiling.budget import set_budget
    from kohya_ext.estimate import activation_budgets

    config = memory_config.read(command)[0]
    _check_supported(config)
    if config.base_precision:
        raise UserError("budgets of a run with --base_precision cannot be computed; remove it")
    settings = _compiling_with(command.settings, 0.0).with_(gradient_checkpointing_ratio=None)
    set_budget(1.0)
    with _prepared(checkout, settings):
        config, arguments, trainer = read(checkout, command)
        arguments.gradient_checkpointing = False
        graphs = activation_budgets.measure(replace(config, gradient_checkpointing=False), arguments, trainer)
    if not graphs:
        raise UserError(f"no block of {command.name}'s model is compiled with these arguments")
    return graphs


def tracing(settings: Settings, config: MemoryConfig) -> Settings:
    """Return a run's settings with its blocks compiled as for the run, for the estimate's backend."""
    if not config.selective_torch_compile:
        return eager(settings)
    from kohya_ext.compiling.budget import set_budget
    from kohya_ext.kernels.triton_package import missing_triton

    if (missing := missing_triton()) is not None:  # inductor generates Triton's code for a GPU
        raise UserError(f"compiled blocks cannot be estimated: {missing}, or remove --selective_torch_compile")
    budget = config.activation_memory_budget
    set_budget(1.0 if budget is None else budget)
    return _compiling_with(settings, budget)


def _compiling_with(settings: Settings, budget: float | None) -> Settings:
    return settings.with_(
        selective_torch_compile=True, compile_mode="default", compile_dynamic="false", activation_memory_budget=budget
    )


def eager(settings: Settings) -> Settings:
    """Return a run's settings without compiled blocks."""
    return settings.with_(selective_torch_compile=False, activation_memory_budget=None)


@contextlib.contextmanager
def _prepared(checkout: Checkout, settings: Settings) -> Iterator[Patcher]:
    """Import the script's modules and apply a run's patches inside the block; turn its errors into UserError."""
    with _quiet(), importable(checkout), patched(checkout, settings) as patcher:
        try:
            yield patcher
        except (RuntimeError, TypeError, AttributeError, KeyError, AssertionError) as error:
            first = str(error).splitlines()[0] if str(error) else ""
            traceback.clear_frames(error.__traceback__)  # fake tensors must not outlive the replaced operators
            raise UnknownRunError(f"this run cannot be estimated: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def patched(checkout: Checkout, settings: Settings) -> Iterator[Patcher]:
    """Apply the patches of a run inside the block."""
    patcher = Patcher(registry(), settings, checkout)
    patcher.arm()
    try:
        yield patcher
    finally:
        patcher.undo()


def read(checkout: Checkout, command: CommandLine) -> tuple[MemoryConfig, argparse.Namespace, NetworkTrainer]:
    """Return a command line's normalized configuration, the arguments that its step reads, and the family's network trainer.

    Raises UserError for arguments the script does not take.
    """
    arguments = _arguments(checkout, command)
    config = memory_config.normalized(memory_config.from_values(vars(arguments), command))
    trainer, defaults = _trainer(checkout, config.family.lora)
    return config, argparse.Namespace(**{**defaults, **vars(arguments), **_step_arguments(config)}), trainer


#: Flags that only a dry run can estimate: this step's fake tensors do not show what they move to the host, and when, or free.
UNSUPPORTED = (
    "cpu_offload_checkpointing",
    "unsloth_offload_checkpointing",
    "num_last_block_to_freeze",
    "train_inpainting",
    "dim_from_weights",
    "gradient_release",
)


def _check_supported(config: MemoryConfig) -> None:
    """Raise UserError for a configuration that cannot be estimated."""
    for name in UNSUPPORTED:
        if getattr(config, name):
            raise UnknownRunError(f"a run with --{name} cannot be estimated; remove it")
    for problem in deepspeed.conflicts(Path(config.script), argparse.Namespace(**vars(config))):
        raise UserError(problem)
    if (config.num_processes or 1) > 1 and config.steps_in_backward:
        raise UserError("several processes and --fused_backward_pass cannot be combined; see `plan --gpus`")
    if config.base_precision and (reason := reason_to_refuse(config, config.script)) is not None:
        raise UserError(f"--base_precision {config.base_precision}: {reason}")
    if not config.family.unet and config.trains_text_encoder and not config.trains_network:
        raise UnknownRunError(f"{config.script} with --train_text_encoder cannot be estimated; remove it")


def _step_arguments(config: MemoryConfig) -> dict[str, Any]:
    """Return the normalized values that the step reads from its arguments."""
    names = ("mixed_precision", "full_fp16", "full_bf16", "cache_latents", "cache_text_encoder_outputs")
    # Caption weights and loss masks take next to no memory, but need captions and masks.
    values = {name: getattr(config, name) for name in names} | {"weighted_captions": False, "masked_loss": False}
    # A fine-tune runs the network trainer's step, which by default would train the text encoders.
    return values if config.trains_network else {**values, "network_train_unet_only": not config.trains_text_encoder}


def _arguments(checkout: Checkout, command: CommandLine) -> argparse.Namespace:
    """Parse the command line with the script's own parser, over the preset and the config file."""
    parser = script_names(checkout, checkout.script(command.name))["setup_parser"]()
    take_over(parser, command)
    own = dict(options())
    preset = {key: value.value for key, value in command.presets.values.items() if key not in own}
    from_file = {
        key: value for key, value in (command.config.values if command.config is not None else {}).items() if key not in own
    }
    problems = [(f"preset {command.presets.label}", find_problem(parser, key, value)) for key, value in preset.items()]
    if command.config is not None:
        problems += [
            (str(command.config.path), problem) for problem in find_problems(parser, command.config) if problem.certain
        ]
    if wrong := [f"{where}: {problem}" for where, problem in problems if problem is not None]:
        raise UserError("\n".join(wrong))
    parser.set_defaults(**preset)
    parser.set_defaults(**from_file)
    arguments: argparse.Namespace = parser.parse_args(launcher_options(command.words)[1])
    return arguments


def _trainer(checkout: Checkout, script: str) -> tuple[NetworkTrainer, dict[str, Any]]:
    """Return a network script's trainer, and the defaults of its arguments, which its step may read."""
    names = script_names(checkout, checkout.script(script))
    own = [kind for kind in names.values() if isinstance(kind, type) and kind.__module__ == names["__name__"]]
    trainer = next((kind for kind in own if hasattr(kind, "process_batch")), None)
    if trainer is None:
        raise UnknownRunError(
            f"{checkout.label} cannot be estimated, because its trainers have no process_batch; estimate the same command with "
            f"v{PINNED_VERSION}: --sd-scripts FOLDER"
        )
    instance = trainer()
    for name in ("cast_text_encoder", "cast_unet", "cast_vae"):
        if not hasattr(instance, name):  # before v0.10 every model was cast
            setattr(instance, name, lambda arguments: True)
    return instance, vars(names["setup_parser"]().parse_args([]))


#: Checkout, configuration and arguments as a measurement read them, and its logs: many configurations differ only in the step.
_CACHING_LOGS: list[tuple[Path, Recorded, Recorded, Any]] = []


def _caching(checkout: Checkout, config: MemoryConfig, arguments: argparse.Namespace, trainer: NetworkTrainer) -> Any:
    from kohya_ext.estimate.step import measure_caching

    for path, read_config, read_arguments, logs in _CACHING_LOGS:
        if path == checkout.path and same_for(read_config, config) and same_for(read_arguments, arguments):
            return logs
    inputs: tuple[Any, Any] = Recorded(config), Recorded(arguments)
    logs = measure_caching(*inputs, trainer)
    _CACHING_LOGS.append((checkout.path, *inputs, logs))
    return logs


def _measure_step(
    checkout: Checkout, patcher: Patcher, config: MemoryConfig, arguments: argparse.Namespace, trainer: NetworkTrainer
) -> Estimate:
    from kohya_ext.estimate import step as steps
    from kohya_ext.estimate.allocator import CachingAllocator, ExpandableAllocator, minimum_reserved
    from kohya_ext.estimate.replay import replay, replay_steps, tensor_peak

    steps.configure(config, arguments, trainer)
    step = steps.measure(config, arguments, trainer, [patch.freezes for patch in patcher.active() if patch.freezes is not None])
    caching = _caching(checkout, config, arguments, trainer)
    logs = {**caching, "step": step, **step.between}
    kind = ExpandableAllocator if config.expandable_segments else CachingAllocator
    memory = replay(caching, step, step.between, kind)
    highest = max(memory, key=lambda name: memory[name].reserved)
    reserved = memory[highest].reserved
    allocated = max(memory[highest].allocated.values())
    assert step.work is not None, "a step has work"
    log = logs[highest]
    tensors = tensor_peak(log)

    def run(limited: CachingAllocator) -> None:
        if log.recording is None:
            limited.replay(log.events)
        else:
            replay_steps(limited, log)

    return Estimate(
        config=config.key(),
        allocated=allocated,
        reserved=reserved,
        minimum_reserved=minimum_reserved(run, allocated, reserved, kind),
        peak_phase=tensors.phase if highest == "step" else highest,
        parts={kind.value: size for kind, size in tensors.parts.items()} | {"rounding": allocated - tensors.bytes},
        phase_peaks={phase: size for part in memory.values() for phase, size in part.allocated.items()},
        flops=step.flops,
        work=step.work.as_row(),
        trainable_parameters=step.trainable_parameters,
        trained_tensors=step.trained_tensors,
        host=step.host,
        recorded_kernels=0 if step.recording is None else step.recording.kernels,
        versions={
            "kohya_ext": __version__,
            "sd_scripts": checkout.version or checkout.commit or "unknown",
            "torch": str(cache.version("torch")),
        },
        layout=checkout.layout,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the scripts' output and log lines, and the warnings of their libraries."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
