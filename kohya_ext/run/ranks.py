"""Agreement between the processes of a run, and failures of one of them.

A failed process takes no part in collective operations. With gloo the others fail when it ends, but with NCCL they wait until
--ddp_timeout. Every process therefore reads the run's key-value store (torch.distributed's TCPStore) once a second, in a
thread because the main thread may be waiting for the failed process. The launcher of the first machine holds the store,
or the first process of a run without a launcher.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from kohya_ext.console import error, warn
from kohya_ext.errors import first_line
from kohya_ext.patching.training_loop import TrainingCallback, callbacks, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal

INTERVAL = 1.0
"""Seconds between two reads of the store."""

GRACE = 5.0
"""Seconds that a process has to end by itself after another one has failed."""

EXIT_LIMIT = 20.0
"""Seconds that its exit handlers may take."""

SAVING_TIMEOUT = 600.0
"""Seconds that the processes wait for the first one to save the state of a step."""

_CONNECTION_TIMEOUT = 30.0
"""Seconds in which the store of a run that starts must answer."""

_FAILURE = "failure"

#: Parts of errors of collective operations when another process has ended.
_DISCONNECTED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Gloo", "gloo")


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether the processes share the weights or the optimizer state, as with DeepSpeed and FSDP."""
    return str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "FSDP")


def is_deepspeed(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed steps the optimizer."""
    return str(accelerator.distributed_type).endswith("DEEPSPEED")


def largest(accelerator: Accelerator, value: int) -> int:
    """Return the largest value of all processes, which must all call this. A single process does not synchronize."""
    if accelerator.num_processes == 1:
        return value
    import torch

    return int(accelerator.gather(torch.tensor([value], device=accelerator.device)).max().item())


@dataclass(frozen=True)
class Failure:
    """The first failure of a process in this run."""

    reason: str
    """One line, with the process."""
    rank: int
    out_of_memory: str = ""
    """The phase of an out-of-memory error."""
    keeps_state: bool = False
    """Whether the process still has the last complete step, and waits until the first process has saved it."""


_LOST = Failure("the connection to the first machine was lost", -1)


def attempt(environment: Mapping[str, str]) -> int:
    """Return how often the launcher of a run has restarted its processes with the same key-value store.

    torchrun has a new store for each restart of several machines (``--rdzv_backend c10d``), whose counts of restarts differ.
    """
    several = environment.get("GROUP_WORLD_SIZE", "1") != "1"
    return 0 if several else int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))


def store(environment: Mapping[str, str], seconds: float = _CONNECTION_TIMEOUT) -> Any:
    """Return a connection to the key-value store of a run, with keys of this start of its processes.

    Raises KeyError if the environment is not that of a distributed run, and RuntimeError if the store does not answer within
    some seconds.
    """
    from torch.distributed import PrefixStore, TCPStore

    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    libuv = {"use_libuv": os.name != "nt"}  # torch's wheels for Windows lack it
    connection = TCPStore(host, port, None, False, timedelta(seconds=seconds), **libuv)
    return PrefixStore(f"kohya_ext/{attempt(environment)}", connection)


def publish(connection: Any, failure: Failure) -> Failure:
    """Store a failure unless there is an earlier one; return the stored one."""
    return Failure(**json.loads(connection.compare_set(_FAILURE, "", json.dumps(asdict(failure)))))


def name(rank: int) -> str:
    """Return the name of a process of this machine for messages."""
    return f"rank {rank} on {socket.gethostname()}"


@dataclass
class FailureWatch(TrainingCallback):
    """Ends this process when another one has failed."""

    accelerator: Accelerator
    connection: Any
    failure: Failure | None = None
    """The first failure, once this process knows it."""
    stopping: bool = False
    """Whether the run ends after this step, for example because its launcher, which held the store, was killed."""
    _left: threading.Event = field(default_factory=threading.Event)

    @property
    def rank(self) -> int:
        """The number of this process in the run."""
        return self.accelerator.process_index

    def listen(self) -> None:
        """Start to read the store."""
        threading.Thread(target=self._watch, name="kohya_ext-ranks", daemon=True).start()

    def leave(self) -> None:
        """Stop to read the store, because the processes end."""
        self._left.set()

    def on_exception(self, problem: BaseException) -> None:
        """Publish an exception that no earlier callback has published."""
        self.explain(problem)

    def on_exit(self) -> None:
        """Stop to read the store."""
        self.leave()

    def on_end(self) -> None:
        """Stop to read the store."""
        self.leave()

    def fail(self, reason: str, out_of_memory: str = "", keeps_state: bool = False) -> None:
        """Publish the failure of this process; an earlier failure of another process has precedence."""
        if self.failure is None:
            failure = Failure(f"{name(self.rank)}: {reason}", self.rank, out_of_memory, keeps_state)
            self.failure = failure
            with contextlib.suppress(RuntimeError):  # the first machine may have failed too
                self.failure = publish(self.connection, failure)

    def is_consequence(self, problem: BaseException) -> bool:
        """Return whether another process has failed before, or an exception says that one has ended."""
        is_other = self.failure is not None and self.failure.rank != self.rank
        return is_other or any(text in str(problem) for text in _DISCONNECTED)

    def explain(self, problem: BaseException) -> str:
        """Return the reason of an uncaught exception: its first line, or the failure of another process that caused it."""
        own = first_line(problem)
        if self.failure is None and any(text in str(problem) for text in _DISCONNECTED):
            until = time.monotonic() + GRACE
            while self.failure is None and time.monotonic() < until:
                failure = self._read()
                self.failure = failure if failure != _LOST else None
                time.sleep(INTERVAL / 10)
            if self.failure is None:
                return f"another process of this run has ended ({own})"
        self.fail(own)
        return own if self.failure is None or self.failure.rank == self.rank else self.failure.reason

    def share(self, key: str, value: Any) -> None:
        """Store a value of plain data and tensors for the other processes."""
        import torch

        content = io.BytesIO()
        torch.save(value, content)
        with contextlib.suppress(RuntimeError):
            self.connection.set(key, content.getvalue())

    def fetch(self, key: str, seconds: float) -> Any:
        """Return a value that another process shares; None if it does not within some seconds."""
        import torch

        try:
            self.connection.wait([key], timedelta(seconds=seconds))
            return torch.load(io.BytesIO(self.connection.get(key)), weights_only=True)
        except RuntimeError:
            return None

    def _read(self) -> Failure | None:
        with contextlib.suppress(RuntimeError):
            if self.connection.check([_FAILURE]):
                return Failure(**json.loads(self.connection.get(_FAILURE)))
            return None
        return _LOST

    def _watch(self) -> None:
        lost = 0
        while not self._left.wait(INTERVAL):
            failure = self._read()
            lost = lost + 1 if failure == _LOST else 0
            if failure is None or (failure == _LOST and (self.stopping or lost * INTERVAL < GRACE)):
                continue
            if failure.rank != self.rank:
                self.failure = failure
                self._follow(failure)
            return

    def _follow(self, failure: Failure) -> None:
        """Let the callbacks save their part, and end the process unless it ends by itself."""
        with _on_another_stream(self.accelerator.device):
            for callback in callbacks():
                try:
                    callback.on_peer_failure(failure)
                except Exception as problem:  # the process must end
                    warn(f"after a failure of {failure.reason}: {type(problem).__name__}: {problem}")
        if self._left.wait(GRACE):
            time.sleep(EXIT_LIMIT)  # the main thread has noticed it, too, and runs the exit handlers
        else:
            if self.accelerator.is_main_process:
                error(f"{failure.reason}; this process ends")
            journal.finish()
        os._exit(1)


@contextlib.contextmanager
def _on_another_stream(device: Any) -> Iterator[None]:
    """Run CUDA operations inside the block on another stream, because the main thread's waits for the failed process."""
    if device.type != "cuda":
        yield
        return
    import torch

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def watch() -> FailureWatch | None:
    """Return the watch of this process's run; None in a run of one process."""
    return current(FailureWatch)


def leave() -> None:
    """Let this process end although others may end earlier, after all have agreed to stop."""
    if (watching := watch()) is not None:
        watching.leave()
