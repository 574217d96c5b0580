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
from kohya_ext.renames import replace_text
from kohya_ext.speed import switches

#: Seconds that a self-test may take, most of which are PyTorch's import and Triton's compilation.
LIMIT = 240.0

_SCHEMA = 1

_FOLDER = "self_tests"

_PROGRAM = "kohya_ext.speed.self_test"

#: The code whose change makes the results outdated: every kernel, and what records, compiles and swaps.
_CODE = (
    "kernels/*.py",
    *("compiling/graphs.py", "compiling/cuda_recorder.py"),
    *("compiling/blocks.py", "compiling/configuration.py", "compiling/fallback.py", "speed/self_test.py"),
    *("patching/swapped_blocks.py", "patching/page_lock.py"),
)

#: Name of each feature that is tested -> its name in messages.
FEATURES = {**{switch.name: switch.title for switch in switches.ALL}, "one_way_block_swap": "one-way block swap"}

Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]

Problems = dict[str, str | None]


def problems(machine: dict[str, str], names: Iterable[str], start: Start, report: Callable[[str], None]) -> Problems:
    """Return why each named feature must not be used on a machine; None for one that may.

    Kept results are returned immediately. ``start`` starts a process that tests some features. ``report`` receives a line
    before it starts, and one if the results cannot be kept.
    """
    names = list(names)
    results = _read(machine)
    missing = [name for name in names if name not in results]
    if missing:
        report(f"testing the {machine['gpu']}, once for this driver and PyTorch")
        until = time.monotonic() + LIMIT
        while missing:  # a test that ends the process leaves those after it
            results |= _tested(start, missing, until)
            missing = [name for name in missing if name not in results]
        _keep(machine, results, report)
    return {name: results[name] for name in names}


def _tested(start: Start, names: Sequence[str], until: float) -> Problems:
    try:
        process = start(names)
    except OSError as error:
        return dict.fromkeys(names, f"its self-test cannot be started: {error}")
    try:
        return _outcome(process, names, max(1.0, until - time.monotonic()))
    finally:
        process.kill()  # after an interrupt


def _keep(machine: dict[str, str], results: Problems, report: Callable[[str], None]) -> None:
    text = json.dumps({"schema": _SCHEMA, "machine": machine, "results": results}, indent=1)
    try:
        replace_text(file_of(machine), text + "\n")
    except OSError as error:
        report(f"the self-test's results cannot be kept, and the next run repeats it: {error}")


def tested_code() -> list[Path]:
    """Return the files whose change makes the results outdated."""
    folder = Path(__file__).parents[1]
    return [file for pattern in _CODE for file in sorted(folder.glob(pattern))]


def machine(device: Any) -> dict[str, str]:
    """Return what the results for a CUDA device depend on."""
    import torch

    try:
        from triton import __version__ as triton
    except Exception:  # not installed, or broken
        triton = "none"
    code = hashlib.sha256(b"".join(file.read_bytes() for file in tested_code())).hexdigest()[:12]
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


def _outcome(process: subprocess.Popen[str], names: Sequence[str], limit: float) -> Problems:
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
    results: Problems = {}
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


def _read(machine: dict[str, str]) -> Problems:
    try:
        document = json.loads(file_of(machine).read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA or document["machine"] != machine:
            return {}
        return {str(name): None if problem is None else str(problem) for name, problem in document["results"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
