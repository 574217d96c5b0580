"""Start workers, send them commands and stop them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.sdscripts.checkouts import Checkout
from kohya_ext.tiny import environment

ROOT = Path(__file__).parent.parent


class WorkerError(Exception):
    """A worker reported an error, or ended without an answer."""


@dataclass(frozen=True)
class Bench:
    """Where a benchmark runs."""

    checkout: Checkout
    device: str
    """``cuda`` or ``cpu``."""
    reduced: bool
    scratch: Path
    """Folder for logs, tiny models and compiled code."""
    python: str = field(default=sys.executable)

    def environment(self, **more: str) -> dict[str, str]:
        """Return a process's variables: this source tree first, small models when reduced, no option of the extension set."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KOHYA_EXT", "SDSCRIPTS_"))}
        folders = [environment.SITE] if self.reduced else []
        variables = {
            **kept,
            "PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "compiled"),
        }
        if "KOHYA_EXT_CACHE" in os.environ:
            variables["KOHYA_EXT_CACHE"] = os.environ["KOHYA_EXT_CACHE"]
        if self.device == "cpu":
            # OpenMP threads busy-wait, which makes small steps many times slower on shared cores.
            variables |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return {**variables, **more}


@dataclass
class Worker:
    """A running ``benchmarks.worker``."""

    process: subprocess.Popen[str]
    log: Path

    def ask(self, command: Mapping[str, Any] | None = None, patience: float | None = None) -> dict[str, Any]:
        """Send a command, if any, and return the answer. Raises WorkerError, also after ``patience`` seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begun = time.monotonic()
        end = threading.Timer(patience or 0, self.process.kill)
        if patience is not None:
            end.start()
        try:
            if command is not None:
                self.process.stdin.write(json.dumps(command) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            end.cancel()
        if not line and patience is not None and time.monotonic() - begun >= patience:
            raise WorkerError(f"stopped after {patience:.0f} s without an answer")
        if not line:
            raise WorkerError(f"it ended with exit code {self.process.wait()}: {last_line(self.log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        return answer

    def end(self) -> None:
        """Wait until the worker has ended and its memory is free."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the worker ended before it read everything
            self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def worker(bench: Bench, name: str, spec: Mapping[str, Any], **variables: str) -> Iterator[Worker]:
    """Run a worker inside the block. The caller reads its first answer, which comes after its preparation."""
    bench.scratch.mkdir(parents=True, exist_ok=True)
    log = bench.scratch / f"{name}.log"
    whole = {"sd_scripts": str(bench.checkout.path), **spec}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [bench.python, "-m", "benchmarks.worker", json.dumps(whole)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=bench.scratch,
            env=bench.environment(**variables),
        )
        running = Worker(process, log)
        try:
            yield running
        finally:
            running.end()


def ask_once(bench: Bench, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run a worker for one answer. Raises WorkerError."""
    with worker(bench, name, spec) as running:
        return running.ask()


def last_line(log: Path) -> str:
    """Return the last line of a log that is not blank."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def available(patches: Sequence[str]) -> str | None:
    """Return a sentence about a variant's missing patches; None if none is missing."""
    from kohya_ext.patching.patch import registry

    missing = [name for name in patches if name not in registry()]
    return f"this version has no patch {', '.join(missing)}" if missing else None
