"""Run the self-test of a GPU in a process of its own, and keep its results in the user's cache.

A kernel that crashes, hangs or computes a wrong number there costs no run: the feature is off on this machine, until the GPU's
driver, PyTorch, Triton or the kernels themselves change.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kohya_ext import __version__, cache
from kohya_ext.installed_gpus import driver_version
from kohya_ext.renames import rename

#: Seconds that a self-test may take, most of which are PyTorch's import and Triton's compilation.
LIMIT = 240.0

_SCHEMA = 1

_FOLDER = "self_tests"

_PROGRAM = "kohya_ext.speed.self_test"

#: The code whose change makes the results outdated.
_CODE = ("kernels/fused.py", "kernels/gates.py", "compiling/graphs.py", "compiling/cuda_recorder.py", "speed/self_test.py")

Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]


class SelfTest:
    """The self-test of one GPU: earlier results, and a process for those that are missing.

    ``start`` starts the process for the names of features. ``report`` receives one line if results cannot be kept.
    """

    def __init__(self, machine: dict[str, str], names: Iterable[str], start: Start, report: Callable[[str], None]) -> None:
        self._machine, self._report = machine, report
        self._results = _read(machine)
        self._missing = [name for name in names if name not in self._results]
        self._start = start
        self._until = time.monotonic() + LIMIT
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str] | None:
        if not self._missing:
            return None
        try:
            return self._start(self._missing)
        except OSError as error:
            self._results |= dict.fromkeys(self._missing, f"its self-test cannot be started: {error}")
            return None

    @property
    def runs(self) -> bool:
        """Whether the process has not been waited for."""
        return self._process is not None

    def problem(self, name: str) -> str | None:
        """Return why a feature must not be used on this machine; None if it may. Waits for the process."""
        tested = self._process is not None
        while self._process is not None:
            self._results |= outcome(self._process, self._missing, max(1.0, self._until - time.monotonic()))
            # A test that ends the process leaves those after it.
            self._missing = [each for each in self._missing if each not in self._results]
            self._process = self._started()
        if tested:
            self._keep()
        return self._results.get(name, "it has no self-test")

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _keep(self) -> None:
        file = file_of(self._machine)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"schema": _SCHEMA, "machine": self._machine, "results": self._results}, indent=1)
            partial.write_text(text + "\n", encoding="utf-8")
            rename(partial, file)
        except OSError as error:
            self._report(f"the self-test's results cannot be kept, and the next run repeats it: {error}")


def machine(device: Any) -> dict[str, str]:
    """Return what the results for a CUDA device depend on."""
    import torch

    try:
        from triton import __version__ as triton
    except Exception:  # not installed, or broken
        triton = "none"
    folder = Path(__file__).parents[1]
    code = hashlib.sha256(b"".join((folder / name).read_bytes() for name in _CODE)).hexdigest()[:12]
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": driver_version(),
        "system": sys.platform,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton,
        "kohya_ext": f"{__version__} {code}",
    }


def file_of(machine: dict[str, str]) -> Path:
    """Return the file with the results for a machine."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return cache.folder() / _FOLDER / f"{digest}.json"


def starter(index: int) -> Start:
    """Return the function that starts the self-test on the CUDA device of an index in this process."""

    def start(names: Sequence[str]) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KOHYA_EXT", "SDSCRIPTS_"))}
        environment["KOHYA_EXT_CACHE"] = str(cache.folder())
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])
        return subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(index), *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=environment,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # a GUI has no console to show
        )

    return start


def outcome(process: subprocess.Popen[str], names: Sequence[str], limit: float) -> dict[str, str | None]:
    """Return each feature's problem, None for those without one, after ``limit`` seconds at most."""
    try:
        output, errors = process.communicate(timeout=limit)
        end = f"its self-test ended with code {process.returncode}: {_last_line(errors)}"
    except subprocess.TimeoutExpired:
        end = f"its self-test did not end within {LIMIT:.0f} s"
        process.kill()
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired as error:  # a driver can keep a process that is killed
            output = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout or ""
    results: dict[str, str | None] = {}
    begun: str | None = None
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # a library's own output
            continue
        if isinstance(row, dict) and row.get("begun") in names:
            begun = str(row["begun"])
        elif isinstance(row, dict) and row.get("name") in names:
            results[str(row["name"])] = row["problem"]
    # The feature in whose test the process ended is at fault. Without one, none has been tried.
    failed = names if begun is None or begun in results else [begun]
    return {**results, **{name: end for name in failed if name not in results}}


def _last_line(text: str) -> str:
    return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), "no message")


def _read(machine: dict[str, str]) -> dict[str, str | None]:
    try:
        document = json.loads(file_of(machine).read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA or document["machine"] != machine:
            return {}
        return {str(name): None if problem is None else str(problem) for name, problem in document["results"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
