"""Estimates by a dry run: from the cache, or measured now in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from kohya_ext import __version__
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import options
from kohya_ext.console import progress
from kohya_ext.dry_run import several_processes
from kohya_ext.dry_run.arguments import Arguments, Workload, caption_tokens
from kohya_ext.dry_run.request import RESULT, Request
from kohya_ext.errors import UserError
from kohya_ext.estimate import cache, whole_runs
from kohya_ext.estimate.result import Estimate
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tiny import environment

STEPS = 3

_LOG = "log.txt"

#: Lines at the end of a failed run's output that are shown.
_LINES = 3

#: Options that a dry run cannot estimate -> what to do.
_UNSUPPORTED = {
    "deepspeed": "remove it",
    "vram_budget": "remove it",
}


def estimate(checkout: Checkout, command: CommandLine, fresh: bool = False) -> Estimate:
    """Return the estimate of a command line from the cache, or by a dry run (about a minute); with ``fresh`` always measured.

    Raises UserError for a run that fails, with the end of its output.
    """
    known = None if fresh else whole_runs.find(checkout, command)
    if known is not None:
        return known
    _check_supported(command)
    with progress(f"estimating the memory of {command.name} by a dry run (usually 30 to 120 s)"):
        result = measure(checkout, command)
    result.pop("passes")
    measured = Estimate(**result)
    whole_runs.keep(checkout, command, measured)
    return measured


def _check_supported(command: CommandLine) -> None:
    for name, advice in _UNSUPPORTED.items():
        if command.values.get(name):
            raise UserError(f"--{name} cannot be estimated for this run of {command.name}; {advice}")
    if command.values.get("multi_gpu") and not command.settings.num_processes:
        raise UserError("--multi_gpu starts as many processes as there are GPUs; give --num_processes 2 to estimate that many")


def measure(checkout: Checkout, command: CommandLine) -> dict[str, Any]:
    """Run a command line dry. Return the fields of its estimate, and the peaks after each backward pass as ``passes``.

    Its files are in a temporary folder. Raises UserError for a run that fails.
    """
    workload = Workload.of(command)
    with tempfile.TemporaryDirectory(prefix="kohya_ext_dry_run_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        arguments = Arguments(command, workload, folder)
        _request(checkout, arguments).write(folder)
        _run(arguments)
        if not (folder / RESULT).is_file():
            raise UserError(f"the dry run of {command.name} failed:\n{_end_of_output(folder)}")
        result: dict[str, Any] = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    versions = {
        "kohya_ext": __version__,
        "sd_scripts": checkout.version or checkout.commit or "unknown",
        "torch": str(cache.version("torch")),
    }
    return {**result, "config": _config(arguments), "versions": versions, "layout": checkout.layout}


def _request(checkout: Checkout, arguments: Arguments) -> Request:
    command, workload = arguments.command, arguments.workload
    settings = command.settings
    return Request(
        sd_scripts=str(checkout.path.resolve()),
        script=command.name,
        words=arguments.words(),
        passes=STEPS * workload.micro_steps,
        micro_steps=workload.micro_steps,
        processes=arguments.processes,
        integer=caption_tokens(command, workload.size),
        sampled=arguments.sample is not None,
        expandable_segments=bool(settings["expandable_segments"]),
        compiled=arguments.is_compiled,
        recorded=arguments.is_recorded,
        eight_bits=settings["base_precision"] is not None,
        kernels=bool(settings["base_precision"] or settings["fused_operations"]),
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
        "left_out": arguments.left_out,
        "missing": arguments.missing,
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
        try:
            process.wait()
        finally:
            process.kill()
            process.wait()


def _environment(arguments: Arguments) -> dict[str, str]:
    """Return the environment of the process: without options that a dry run drops, and without the user's cache."""
    replaced = {option.variable for name, option in options() if name in arguments.changes}
    kept = {name: value for name, value in os.environ.items() if name not in replaced}
    return {
        **kept,
        **environment.variables(arguments.folder / "tokenizers"),
        **several_processes.variables(arguments.processes),
        "PYTHONPATH": environment.python_path(),
        "KOHYA_EXT_CACHE": str(arguments.folder / "cache"),
        "PYTHONUTF8": "1",
        **({} if arguments.is_compiled else {"TORCHDYNAMO_DISABLE": "1"}),  # what packages compile runs eager, too
    }


def _end_of_output(folder: Path) -> str:
    lines = (folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-_LINES:])
