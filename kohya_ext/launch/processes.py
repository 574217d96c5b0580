"""Start a script in several processes through ``accelerate launch``, after a check of the options.

accelerate reports most mistakes with a traceback, or waits for processes that never start.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import LAUNCHED, option_words, without_secrets
from kohya_ext.config.settings import MASTER_SWITCH, Settings, secrets
from kohya_ext.errors import UserError
from kohya_ext.installed_gpus import visible_gpus
from kohya_ext.launch.accelerate_signals import wait
from kohya_ext.sdscripts import checkouts
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.units import has_gpu

#: Options that ``accelerate launch`` has under the same name.
_OPTIONS = ("num_processes", "multi_gpu", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


@dataclass(frozen=True)
class Layout:
    """The processes of a run, from the options and accelerate's configuration."""

    processes: int
    """On all machines."""
    machines: int
    rank: int
    """Of this machine."""
    address: str | None
    """Of the first machine."""

    @property
    def on_this_machine(self) -> int:
        """The number of processes of each machine."""
        return self.processes // self.machines


def are_wanted(settings: Settings) -> bool:
    """Return whether the options ask for ``accelerate launch``, and this process is not yet started by it."""
    return bool(settings.accelerate_config is not None or _given(settings)) and LAUNCHED not in os.environ


def launch(settings: Settings, checkout: Checkout, script: Path, arguments: Sequence[str]) -> int:
    """Run the script in the processes that the options ask for; return the exit code. On POSIX it does not return.

    Raises UserError for options with which the processes would fail to start.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("several processes need accelerate; run `pip install accelerate` or remove --num_processes")
    config = _configuration(settings.accelerate_config)
    gpus = visible_gpus()
    check(settings, config, gpus)
    if gpus == 0:
        _check_without_nvidia(layout(settings, config), config)
    options = _given(settings)
    file = {} if settings.accelerate_config is None else {"config_file": settings.accelerate_config}
    # With a configuration of one process, accelerate starts one process whatever --num_processes says.
    is_plain = config.get("distributed_type", "NO") == "NO"
    several = {"multi_gpu": True} if is_plain and layout(settings, config).processes > 1 else {}
    arguments, variables = _secrets_in_variables(arguments)  # accelerate prints the command line of a run that fails
    # Not accelerate.commands.launch: as __main__, kohya_ext.launch.accelerate_signals could not patch that module.
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
    command += option_words({**file, **options, **several})
    # The processes repeat the options in the command lines that they print.
    own = {} if settings.accelerate_config is None else {"accelerate_config": settings.accelerate_config}
    command += ["-m", "kohya_ext", *option_words({**own, **options}), str(script), *arguments]
    environ = {MASTER_SWITCH: "1", **os.environ, **variables, checkouts.VARIABLE: str(checkout.path), LAUNCHED: "1"}
    if os.name == "posix":
        os.execve(sys.executable, command, environ)  # the same process, so signals and the exit code need no forwarding
    process = subprocess.Popen(command, env=environ)
    return wait(process)[0]


def _secrets_in_variables(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments without secret options, and variables that set those; a fork's secrets have no variable."""
    kept, values = without_secrets(arguments)
    variables = secrets()
    kept += option_words({name: value for name, value in values.items() if not variables.get(name)})
    return kept, {variables[name]: value for name, value in values.items() if variables.get(name)}


def _given(settings: Settings) -> dict[str, Any]:
    """Return the options of ``accelerate launch`` that are set, by name."""
    values = {name: getattr(settings, name) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def layout(settings: Settings, config: Mapping[str, Any]) -> Layout:
    """Return the processes of a run; accelerate's own defaults for what neither options nor configuration set."""

    def value(name: str, default: Any) -> Any:
        given = getattr(settings, name)
        return given if given is not None else config.get(name) or default

    def number(name: str, default: int) -> int:
        given = value(name, default)
        try:
            return int(given)
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{name} in accelerate's configuration must be a whole number, not {given!r}") from None

    machines = max(number("num_machines", 1), 1)
    return Layout(number("num_processes", machines), machines, number("machine_rank", 0), value("main_process_ip", None))


def check(settings: Settings, config: Mapping[str, Any], gpus: int) -> None:
    """Raise UserError for processes that would not start or wait for each other forever.

    ``gpus``: the GPUs of this machine that the run may use; 0 if it has none, for processes on CPUs.
    """
    run = layout(settings, config)
    if run.machines > 1 and settings.machine_rank is None and config.get("machine_rank") is None:
        raise UserError(
            f"--num_machines {run.machines} needs --machine_rank: add --machine_rank 0 on the first machine, "
            f"up to --machine_rank {run.machines - 1} on the last"
        )
    if run.rank >= run.machines:
        several = f"; use 0 to {run.machines - 1}" if run.machines > 1 else "; add --num_machines"
        raise UserError(f"--machine_rank {run.rank} is too large for {run.machines} machine{'s' * (run.machines > 1)}{several}")
    if run.machines > 1 and run.address is None:
        raise UserError("several machines need the address of the first one: add --main_process_ip 192.168.1.10, for example")
    if run.machines > 1 and settings.main_process_port is None and config.get("main_process_port") is None:
        raise UserError("several machines need the same port of the first one: add --main_process_port 29500")
    if run.processes % run.machines:
        each = max(round(run.processes / run.machines), 1)
        raise UserError(
            f"--num_processes {run.processes} counts the processes of all machines, and {run.machines} machines cannot share "
            f"them equally; for {each} on each machine use --num_processes {each * run.machines}"
        )
    if 0 < gpus < run.on_this_machine:
        raise UserError(
            f"{run.on_this_machine} processes need {run.on_this_machine} GPUs, but this machine has {gpus} visible; "
            f"use --num_processes {gpus * run.machines}"
        )


def _check_without_nvidia(run: Layout, config: Mapping[str, Any]) -> None:
    """Raise UserError if several processes would have no GPU of another kind, nor train on CPUs on purpose."""
    on_cpus = "yes" if config.get("use_cpu") else os.environ.get("ACCELERATE_USE_CPU", "")
    if run.on_this_machine > 1 and on_cpus.lower() not in ("1", "true", "yes") and not has_gpu():
        raise UserError(
            f"{run.on_this_machine} processes need as many GPUs, and PyTorch finds none here; remove --num_processes, or "
            "set ACCELERATE_USE_CPU=1 to train on CPUs"
        )


def _configuration(file: Path | None) -> Mapping[str, Any]:
    """Return accelerate's configuration: a file, or else the user's default one. Raises UserError for a damaged one."""
    import yaml  # accelerate needs it

    if file is None:
        home = Path(
            os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
        )
        file = next((path for path in (home / "accelerate").glob("default_config.*")), None)
        if file is None:
            return {}
    elif not file.is_file():
        raise UserError(f"--accelerate_config {file}: no such file; write one with `accelerate config --config_file {file}`")
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as problem:
        line = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise UserError(f"{file} is not a configuration of accelerate: {line}; rewrite it with `accelerate config`") from None
    return read if isinstance(read, dict) else {}
