"""Estimates of a command line: known ones, or by a dry run in a process of its own. Nothing here imports torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kohya_ext import __version__
from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import flags, negated_flags, options
from kohya_ext.console import ERROR, progress
from kohya_ext.dry_run import several_processes
from kohya_ext.dry_run.arguments import Arguments, Workload, caption_tokens
from kohya_ext.dry_run.request import RESULT, Request
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, memory_config, whole_runs
from kohya_ext.estimate.memory_config import MemoryConfig
from kohya_ext.estimate.result import Estimate
from kohya_ext.kernels.triton_package import missing_triton
from kohya_ext.preflight import deepspeed
from kohya_ext.preflight.options import impossible
from kohya_ext.quantization.selection import reason_to_refuse, reason_to_refuse_convolutions
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.sdscripts.introspect import option_names
from kohya_ext.tiny import environment

STEPS = 3

_LOG = "log.txt"

#: The processes of dry runs now.
_running: set[subprocess.Popen[bytes]] = set()

#: Lines at the end of a failed run's output that are shown.
_LINES = 3

#: Most dry runs at the same time: they share the memory's bandwidth.
_MOST_TOGETHER = 4

#: Bytes of host memory of a dry run.
_MEMORY = 1_500_000_000

#: Options whose effect depends on the contents of a file.
_BY_FILES = ("dim_from_weights", "train_inpainting")


def estimate(checkout: Checkout, command: CommandLine, fresh: bool = False, timed: bool = False) -> Estimate:
    """Return the estimate of a command line: from the package's table, from the cache, or by a dry run (20 to 60 seconds).

    With ``fresh`` the script is always run, with ``timed`` if its kernels are not known. Raises UserError for a run that cannot
    be estimated, and for one that fails, with the end of its output.
    """
    config = _configuration(checkout, command)
    known = None if fresh else _known(checkout, command, config, timed)
    if known is not None:
        return known
    _check(command, config)
    with progress(f"estimating the memory of {command.name} by a dry run (usually 20 to 60 s)"):
        result = measure(checkout, command)
    result.pop("passes")
    if config is None:
        measured = Estimate(**result)
        whole_runs.keep(checkout, command, measured)
    else:
        measured = Estimate(**{**result, "config": config.key()})
        cache.keep(checkout, measured, command.settings.disable_patch)
    return measured


def estimate_all(
    checkout: Checkout, commands: Sequence[CommandLine], fresh: bool = False, timed: bool = False
) -> list[Estimate]:
    """Return what :func:`estimate` does for each of several command lines, :func:`together` of them at a time."""
    if len(commands) == 1:
        return [estimate(checkout, commands[0], fresh, timed)]
    with progress("estimating memory by dry runs (usually 20 to 60 s)"), several() as pool:
        return [*pool.map(lambda command: estimate(checkout, command, fresh, timed), commands)]


@contextmanager
def several() -> Iterator[Executor]:
    """Yield threads for as many dry runs as :func:`together`. An error or an interrupt in the block ends all of them."""
    with ThreadPoolExecutor(together()) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*_running]:
                process.kill()
            raise


def together() -> int:
    """Return how many dry runs this machine runs at the same time: each takes a core and 1.5 GB of memory."""
    by_memory = int(psutil.virtual_memory().available // _MEMORY)
    return max(1, min(_MOST_TOGETHER, os.cpu_count() or 1, by_memory))


def _configuration(checkout: Checkout, command: CommandLine) -> MemoryConfig | None:
    """Return the configuration by which a run's estimate is known; None if it is known by the whole command line.

    That is so for scripts without presets, for options whose effect is in files, and for options that the script's text does
    not have: its own parser then decides.
    """
    if command.name not in preset_files.FAMILIES:
        return None
    config, flags_left = memory_config.read(command)
    if any(getattr(config, name) for name in _BY_FILES) or _has_unknown_flag(checkout.script(command.name), flags_left):
        return None
    return memory_config.normalized(config)


def _has_unknown_flag(script: Path, given: Sequence[str]) -> bool:
    ours = {flag for name, _ in options() for flag in [*flags(name), *negated_flags(name)]}
    theirs = {flag for name in option_names(script) for flag in [f"--{name}", *negated_flags(name)]}
    return not ours | theirs >= set(given)


def _known(checkout: Checkout, command: CommandLine, config: MemoryConfig | None, timed: bool) -> Estimate | None:
    if config is None:
        return whole_runs.find(checkout, command)
    row = cache.find(checkout, config, command.settings.disable_patch, timed)
    return None if row is None else Estimate(**row)


def _check(command: CommandLine, config: MemoryConfig | None) -> None:
    """Raise UserError for a run that fails for a reason known beforehand."""
    if command.values.get("multi_gpu") and not command.settings.num_processes:
        raise UserError("--multi_gpu starts as many processes as there are GPUs; give --num_processes 2 to estimate that many")
    if command.settings["selective_torch_compile"] and (missing := missing_triton()) is not None:
        raise UserError(f"compiled blocks cannot be estimated: {missing}, or remove --selective_torch_compile")
    if config is None:
        return
    if config.trains_network and config.network_module is None:
        raise UserError("an estimate needs the network; give --network_module (networks.lora for a LoRA) or a preset")
    for problem in deepspeed.conflicts(Path(config.script), argparse.Namespace(**vars(config))):
        raise UserError(problem)
    if (config.num_processes or 1) > 1 and config.steps_in_backward:
        raise UserError("several processes and --fused_backward_pass cannot be combined; see `plan --gpus`")
    if config.base_precision and (reason := reason_to_refuse(config, config.script)) is not None:
        raise UserError(f"--base_precision {config.base_precision}: {reason}")
    reason = reason_to_refuse_convolutions(config.base_precision, config, config.script)
    if command.settings["int8_convolutions"] and reason is not None:
        raise UserError(f"--int8_convolutions: {reason}")


def measure(checkout: Checkout, command: CommandLine) -> dict[str, Any]:
    """Run a command line dry. Return the fields of its estimate, and the peaks after each backward pass as ``passes``.

    Its files are in a temporary folder. Raises UserError for a run that fails.
    """
    arguments, result = _ran(checkout, command)
    versions = {
        "kohya_ext": __version__,
        "sd_scripts": checkout.version or checkout.commit or "unknown",
        "torch": str(cache.version("torch")),
    }
    return {
        **result,
        "config": _config(arguments),
        "versions": versions,
        "layout": checkout.layout,
        "left_out": arguments.left_out,
        "missing": arguments.missing,
    }


def budgets(checkout: Checkout, command: CommandLine) -> list[dict[str, Any]]:
    """Return the graphs of a command line's compiled blocks, without checkpointing, as rows (:mod:`activation_budgets`).

    Raises UserError as :func:`estimate` does, and for a model without compiled blocks.
    """
    if command.settings["base_precision"]:
        raise UserError("budgets of a run with --base_precision cannot be computed; remove it")
    changes = {"selective_torch_compile": True, "gradient_checkpointing": False, "gradient_checkpointing_ratio": None}
    traced = command.with_({**changes, "activation_memory_budget": 0.0, "compile_dynamic": "false"})  # a graph for each size
    _check(traced, _configuration(checkout, traced))
    _, graphs = _ran(checkout, traced, budgets=True)
    if not graphs:
        raise UserError(f"no block of {command.name}'s model is compiled with these arguments")
    return list(graphs)


def _ran(checkout: Checkout, command: CommandLine, budgets: bool = False) -> tuple[Arguments, Any]:
    """Return the arguments of a dry run, and its result."""
    workload = Workload.of(command)
    with tempfile.TemporaryDirectory(prefix="kohya_ext_dry_run_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        arguments = Arguments(command, workload, folder)
        _request(checkout, arguments, budgets).write(folder)
        _run(arguments)
        if not (folder / RESULT).is_file():
            raise UserError(_failure(command, folder))
        return arguments, json.loads((folder / RESULT).read_text(encoding="utf-8"))


def _request(checkout: Checkout, arguments: Arguments, budgets: bool) -> Request:
    command, workload = arguments.command, arguments.workload
    settings = command.settings
    return Request(
        sd_scripts=str(checkout.path.resolve()),
        script=command.name,
        words=arguments.words(),
        passes=STEPS * workload.micro_steps,
        micro_steps=workload.micro_steps,
        processes=arguments.processes,
        deepspeed=arguments.is_divided,
        integer=caption_tokens(command.name, command.values, workload.size),
        sampled=arguments.sample is not None,
        expandable_segments=bool(settings["expandable_segments"]),
        compiled=arguments.is_compiled,
        recorded=arguments.is_recorded,
        eight_bits=settings["base_precision"] is not None,
        kernels=bool(settings["base_precision"] or settings["fused_operations"]),
        budgets=budgets,
    )


def _config(arguments: Arguments) -> dict[str, Any]:
    """Return the part of an estimate's configuration that messages need."""
    command, workload = arguments.command, arguments.workload
    options = {name: command.settings[name] for name in ("base_precision", "selective_torch_compile") if command.settings[name]}
    names = ("network_module", "network_dim", "network_args", "gradient_checkpointing", "gradient_checkpointing_ratio")
    given = {name: command.values[name] for name in names if command.values.get(name)}
    size = {} if workload.size is None else {"resolution": f"{workload.size[0]},{workload.size[1]}"}
    return {
        "script": command.name,
        **given,
        **options,
        **size,
        "train_batch_size": workload.batch,
        "gradient_accumulation_steps": workload.micro_steps,
        "num_processes": arguments.processes,
    }


def _run(arguments: Arguments) -> None:
    """Run the process until it ends. It ends with this one, however that ends."""
    with (arguments.folder / _LOG).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kohya_ext.dry_run.process", str(arguments.folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(arguments),
        )
        _running.add(process)
        try:
            process.wait()
        finally:
            _running.discard(process)
            process.kill()
            process.wait()


def _environment(arguments: Arguments) -> dict[str, str]:
    """Return the environment of the process: without options that a dry run drops, and without the user's cache."""
    replaced = {option.variable for name, option in options() if name in arguments.changes}
    kept = {name: value for name, value in os.environ.items() if name not in replaced}
    return {
        **kept,
        **environment.variables(arguments.folder / "tokenizers"),
        **several_processes.variables(arguments.processes, arguments.is_divided),
        "PYTHONPATH": environment.python_path(),
        "KOHYA_EXT_CACHE": str(arguments.folder / "cache"),
        "PYTHONUTF8": "1",
        **({} if arguments.is_compiled else {"TORCHDYNAMO_DISABLE": "1"}),  # what packages compile runs eager, too
    }


def _failure(command: CommandLine, folder: Path) -> str:
    """Return why a run failed: options that exclude one another, an error of the extension, or the end of the output."""
    excluded = list(impossible(command.script or Path(command.name), argparse.Namespace(**command.values), command.settings))
    text = (folder / _LOG).read_text(encoding="utf-8", errors="replace")
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip() and not re.search(r"\d+%\|", line)]
    own = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    reasons = excluded or own or lines[-_LINES:]
    return "\n".join([f"the dry run of {command.name} failed:", *reasons])
