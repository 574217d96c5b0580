"""Run a command line in a process that measures instead of training, and end it with all of its own processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine
from kohya_ext.patching.patch import registry
from kohya_ext.run import retry_request
from kohya_ext.sdscripts import checkouts
from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tuning.task import Task

#: Seconds that a process has to end after it was asked to, and in which Windows cannot interrupt the wait for it.
_PATIENCE, _INTERVAL = 5.0, 0.5

_WRONG_COMMAND = 2
"""The exit code of a wrong command line."""

_LOG = "log.txt"


class CommandError(Exception):
    """The command line is wrong, so no other configuration of it can run. The message has what the script printed."""


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder for a process, and remove it. On Windows files of a process that was ended stay a moment."""
    path = Path(tempfile.mkdtemp(prefix="kohya_ext-tune-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def measure(checkout: Checkout, command: CommandLine, task: Task, seconds: float) -> dict[str, Any]:
    """Return the result of a task for a command line, or ``{"failed": reason}``, after ``seconds`` at most.

    An interrupt ends the process, and is raised. Raises CommandError for a command line that the script rejects.
    """
    report = Path(task.folder) / "report.json"
    options = {"disable_patch": _silenced(command), "report": str(report), **({} if task.checks else {"preflight": False})}
    own = {name: command.given.get(name) for name in options}
    process = _start(checkout, command.with_(options), replace(task, parent=os.getpid(), own=own))
    try:
        code = _wait(process, time.monotonic() + seconds)
    except KeyboardInterrupt:
        _ask_to_end(process, task)
        raise
    finally:
        _end(process)
    result = _read(task.result)
    if result:
        return {**result, "facts": _read(report).get("facts", {})}
    if code is None:
        return {"failed": f"no result after {seconds:.0f} s"}
    if code == _WRONG_COMMAND:
        raise CommandError(_reason(task, code))
    return {"failed": _reason(task, code)}


def _silenced(command: CommandLine) -> str:
    """Return the patches that are off: those of the user, and those that write something of the run."""
    names = (*command.settings.disable_patch, *only_training())
    return "*" if "*" in names else ",".join(dict.fromkeys(names))


def only_training() -> list[str]:
    """Return the names of the patches that a process which trains nothing leaves off."""
    return [name for name, patch in registry().items() if patch.only_trains]


def _start(checkout: Checkout, command: CommandLine, task: Task) -> subprocess.Popen[bytes]:
    environment = {
        **command.environ,
        **task.variables(),
        # Such a process does not restart itself.
        retry_request.VARIABLE: str(Path(task.folder) / "out_of_memory.json"),
        checkouts.VARIABLE: str(checkout.path),
        "PYTHONUNBUFFERED": "1",
    }
    words = [sys.executable, *command.launcher, str(command.script), *command.argv]
    with (Path(task.folder) / _LOG).open("wb") as log:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, **_own_group()
        )


def _own_group() -> Mapping[str, Any]:
    """Return the arguments with which a process does not receive the console's Ctrl-C, and opens no window."""
    if os.name == "nt":
        return {
            "creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) | getattr(subprocess, "CREATE_NO_WINDOW", 0)
        }
    return {"start_new_session": True}


def _ask_to_end(process: subprocess.Popen[bytes], task: Task) -> None:
    """Let a process end as after Ctrl-C."""
    with suppress(OSError, subprocess.TimeoutExpired):
        task.stop_file.touch()
        process.wait(timeout=_PATIENCE)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its own processes, such as workers of the data loader."""
    with suppress(OSError):
        if os.name == "nt":
            _end_tree(process.pid)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a driver can keep a process that is killed
        process.wait(timeout=_PATIENCE)


def _end_tree(pid: int) -> None:
    import psutil

    with suppress(psutil.Error):
        parent = psutil.Process(pid)
        for each in (*parent.children(recursive=True), parent):
            with suppress(psutil.Error):
                each.kill()


def _wait(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Return a process's exit code; None if it does not end until then."""
    while time.monotonic() < until:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=_INTERVAL)
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def log_of(task: Task) -> list[str]:
    """Return the lines that a process has printed, without progress bars."""
    with suppress(OSError):
        text = (Path(task.folder) / _LOG).read_text(encoding="utf-8", errors="replace")
        return [line.rpartition("\r")[2].strip() for line in text.splitlines() if line.strip()]
    return []


def _reason(task: Task, code: int) -> str:
    """Return why a process has ended, from its last error."""
    lines = log_of(task)
    errors = [line.partition("kohya_ext: error: ")[2] for line in lines if line.startswith("kohya_ext: error: ")]
    if errors:
        return "\n".join(errors)[:500] if code == _WRONG_COMMAND else errors[0][:200]
    ended = f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"
    return f"{ended}: {lines[-1][:200]}" if lines else ended
