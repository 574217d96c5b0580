"""Make the figures of one run: the script's own parser and trainer, and one step of it on fake tensors."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kohya_ext import __version__
from kohya_ext.compiling.support import DEFAULT_BACKEND
from kohya_ext.config.arguments import find_problem, find_problems, take_over
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings, options
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache
from kohya_ext.estimate import memory_config as choosing
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.patching.patch import Patcher, registry
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.introspect import importable, script_names

if TYPE_CHECKING:
    from kohya_ext.estimate.activation_budgets import Graph


def make(checkout: Checkout, command: CommandLine) -> Estimate:
    """Return the figures of a command line, with the patches that the run would have.

    Raises UserError for arguments the script does not take, and for a run that is not modelled.
    """
    choices = choosing.read(command)[0]
    _refuse(choices)
    with _prepared(checkout, tracing(command.settings, choosing.normalized(choices))):
        return _measure(checkout, *read(checkout, command))


def make_budgets(checkout: Checkout, command: CommandLine) -> list[Graph]:
    """Return what the activation memory budget does to each compiled block of a command line, without checkpointing.

    Raises UserError as :func:`make` does, and for a model of which nothing is compiled.
    """
    from kohya_ext.compiling.budget import set_budget
    from kohya_ext.estimate.activation_budgets import BACKEND, measure

    _refuse(choosing.read(command)[0])
    settings = replace(_compiling_with(BACKEND, command.settings), gradient_checkpointing_ratio=None)
    set_budget(1.0)  # with what makes shares mean activations
    with _prepared(checkout, settings):
        choices, arguments, trainer = read(checkout, command)
        arguments.gradient_checkpointing = False
        graphs = measure(replace(choices, gradient_checkpointing=False), arguments, trainer)
    if not graphs:
        raise UserError(f"no block of {command.name}'s model is compiled with these arguments")
    return graphs


def tracing(settings: Settings, choices: MemoryConfig) -> Settings:
    """Return a run's settings with blocks compiled as far as tensors without data can be: traced and divided, by the budget."""
    if not choices.selective_torch_compile:
        return eager(settings)
    if settings.compile_backend != DEFAULT_BACKEND:
        raise UserError(f"estimates with --compile_backend {settings.compile_backend} are not modelled: {DEFAULT_BACKEND} is")
    from kohya_ext.compiling.budget import set_budget
    from kohya_ext.estimate.compiled import BACKEND

    budget = choices.activation_memory_budget
    set_budget(1.0 if budget is None else budget)
    return _compiling_with(BACKEND, settings)


def _compiling_with(backend: str, settings: Settings) -> Settings:
    return replace(
        settings, selective_torch_compile=True, compile_backend=backend, compile_mode="default", compile_dynamic="false",
        activation_memory_budget=None,
    )  # fmt: skip


def eager(settings: Settings) -> Settings:
    """Return a run's settings without compiling."""
    return replace(settings, selective_torch_compile=False, activation_memory_budget=None)


@contextlib.contextmanager
def _prepared(checkout: Checkout, settings: Settings) -> Iterator[None]:
    """Have the script's modules and a run's patches inside the block, which may only raise UserError."""
    with _quiet(), importable(checkout), patched(checkout, settings):
        try:
            yield
        except (RuntimeError, TypeError, AttributeError, KeyError, AssertionError) as error:
            first = str(error).splitlines()[0] if str(error) else ""
            traceback.clear_frames(error.__traceback__)  # fake tensors must not outlive the operators laid over torch's own
            raise UserError(f"this run cannot be estimated: {type(error).__name__}: {first}") from error


@contextlib.contextmanager
def patched(checkout: Checkout, settings: Settings) -> Iterator[None]:
    """Have the patches of a run inside the block."""
    patcher = Patcher(registry(), settings, checkout)
    patcher.arm()
    try:
        yield
    finally:
        patcher.undo()


def read(checkout: Checkout, command: CommandLine) -> tuple[MemoryConfig, argparse.Namespace, Any]:
    """Return a command line's normalized choices, the arguments that its step reads, and its family's network trainer.

    Raises UserError for arguments the script does not take.
    """
    arguments = _arguments(checkout, command)
    choices = choosing.normalized(choosing.from_values(vars(arguments), command))
    trainer, defaults = _trainer(checkout, choices.family.lora)
    return choices, argparse.Namespace(**{**defaults, **vars(arguments), **_spelling(choices)}), trainer


#: Flags whose memory is not modelled: what they move, and when, no fake tensor shows.
NOT_MODELLED = (
    "deepspeed",
    "cpu_offload_checkpointing",
    "unsloth_offload_checkpointing",
    "num_last_block_to_freeze",
    "train_inpainting",
    "dim_from_weights",
)


def _refuse(choices: MemoryConfig) -> None:
    """Raise UserError for what is known not to be modelled."""
    for name in NOT_MODELLED:
        if getattr(choices, name):
            raise UserError(f"estimates with --{name} are not modelled")
    if not choices.family.unet and choices.trains_text_encoder and not choices.trains_network:
        raise UserError(f"estimates for {choices.script} with --train_text_encoder are not modelled")


def _spelling(choices: MemoryConfig) -> dict[str, Any]:
    """The normalized choices that the step reads from its arguments."""
    names = ("mixed_precision", "full_fp16", "full_bf16", "cache_latents", "cache_text_encoder_outputs")
    # Weights of captions and masks of losses are a few numbers, but want captions and masks.
    arguments = {name: getattr(choices, name) for name in names} | {"weighted_captions": False, "masked_loss": False}
    # A fine-tune runs the network trainer's step: as one that trains no text encoder, unless it says so.
    return arguments if choices.trains_network else {**arguments, "network_train_unet_only": not choices.trains_text_encoder}


def _arguments(checkout: Checkout, command: CommandLine) -> argparse.Namespace:
    """Return what the script's own parser makes of the command line, over the preset and the config file."""
    parser = script_names(checkout, checkout.script(command.name))["setup_parser"]()
    take_over(parser, command)
    own = dict(options())
    preset = {key: value.value for key, value in command.presets.values.items() if key not in own}
    config = {
        key: value for key, value in (command.config.values if command.config is not None else {}).items() if key not in own
    }
    found = [(f"preset {command.presets.label}", find_problem(parser, key, value)) for key, value in preset.items()]
    if command.config is not None:
        found += [(str(command.config.path), problem) for problem in find_problems(parser, command.config) if problem.certain]
    if wrong := [f"{where}: {problem}" for where, problem in found if problem is not None]:
        raise UserError("\n".join(wrong))
    parser.set_defaults(**preset)
    parser.set_defaults(**config)
    arguments: argparse.Namespace = parser.parse_args(command.words)
    return arguments


def _trainer(checkout: Checkout, script: str) -> tuple[Any, dict[str, Any]]:
    """Return a network script's trainer, and its arguments' defaults, which the trainer's step may read."""
    names = script_names(checkout, checkout.script(script))
    own = [kind for kind in names.values() if isinstance(kind, type) and kind.__module__ == names["__name__"]]
    trainer = next(kind for kind in own if hasattr(kind, "process_batch"))
    return trainer(), vars(names["setup_parser"]().parse_args([]))


#: What caching depends on, of all choices.
_FOR_CACHING = (
    *("script", "resolution", "train_batch_size", "cache_latents", "cache_text_encoder_outputs", "vae_batch_size"),
    *("lowram", "text_encoder_batch_size", "text_encoder_cpu", "mixed_precision", "no_half_vae", "vae_chunk_size", "v2"),
    *("model_type", "vae_disable_cache", "qwen_image_vae_2d"),
    *("t5xxl", "fp8_vl", "max_token_length", "t5xxl_max_token_length", "gemma2_max_token_length", "qwen3_max_token_length"),
    *("t5_max_token_length", "apply_t5_attn_mask", "apply_lg_attn_mask"),
)

#: Logs of caching that were made by this process: many configurations differ in the step alone.
_CACHING: dict[tuple[object, ...], Any] = {}


def _caching(checkout: Checkout, choices: MemoryConfig, arguments: argparse.Namespace, trainer: Any) -> Any:
    from kohya_ext.estimate.step import measure_caching

    key = (checkout.path, *(getattr(choices, name) for name in _FOR_CACHING))
    if key not in _CACHING:
        _CACHING[key] = measure_caching(choices, arguments, trainer)
    return _CACHING[key]


def _measure(checkout: Checkout, choices: MemoryConfig, arguments: argparse.Namespace, trainer: Any) -> Estimate:
    from kohya_ext.estimate.allocator import CachingAllocator, least
    from kohya_ext.estimate.events import peak, peak_by_phase
    from kohya_ext.estimate.step import measure, settle

    settle(choices, arguments, trainer)
    step = measure(choices, arguments, trainer)
    logs = {**_caching(checkout, choices, arguments, trainer), "step": step, **step.between}
    peaks = {name: peak(log.events, log.kinds) for name, log in logs.items()}
    reserved = {}
    for name, log in logs.items():
        allocator = CachingAllocator()
        allocator.replay(log.events)
        reserved[name] = allocator.reserved
    highest = max(logs, key=lambda name: reserved[name])
    moments = {name: found.bytes for name, found in peaks.items() if name != "step"}
    before = sum(event.bytes for event in step.events[: step.start])
    return Estimate(
        choices=choices.key(),
        allocated=peaks[highest].bytes,
        reserved=reserved[highest],
        least=least(logs[highest].events, peaks[highest].bytes, reserved[highest]),
        moment=peaks["step"].phase if highest == "step" else highest,
        parts={kind.value: size for kind, size in peaks[highest].parts.items()},
        moments={**moments, **peak_by_phase(step.events[step.start :], before)},
        flops=step.flops,
        trained=step.trained,
        made_with={
            "kohya_ext": __version__,
            "sd_scripts": checkout.version or checkout.commit or "unknown",
            "torch": str(cache.version("torch")),
        },
        layout=checkout.layout,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the scripts' log lines and their libraries' warnings to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
