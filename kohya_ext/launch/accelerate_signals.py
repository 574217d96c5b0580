"""Make ``accelerate launch`` forward signals, wait for training, and start several processes on Windows.

For a launcher in whose environment the extension is enabled.

By default SIGTERM ends only the launcher, and Ctrl-C ends it with a traceback while the training process is still saving.
With several processes, torch's elastic agent forwards Ctrl-C although the terminal has already sent it, and a second one
kills the run. After 30 seconds it kills the remaining processes, but saving a large model can take longer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, wraps
from types import FrameType
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import drop_unwritable, replace_unencodable
from kohya_ext.console import error as print_error
from kohya_ext.patching.patch import Patch, Patcher, Target
from kohya_ext.run import ranks

_HAS_SIGTERM = os.name == "posix"

#: Signals with which a run is stopped: Ctrl-C, SIGTERM, Ctrl-Break on Windows, and elsewhere a closed terminal.
_STOPS: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
if sys.platform == "win32":
    _STOPS += (signal.SIGBREAK,)
elif signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
    _STOPS += (signal.SIGHUP,)

_PUBLISHING_TIMEOUT = 3.0

_SHUTDOWN_TIMEOUT = 24 * 3600
"""Seconds that stopping processes may take. A second signal ends them immediately."""


def _patient(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def simple_launcher(*args: Any, **kwargs: Any) -> Any:
        for number in _STOPS:
            signal.signal(number, _pass_on)
        try:
            return original(*args, **kwargs)
        except subprocess.CalledProcessError as error:
            # The script has already printed its error, so exit with its code instead of a traceback.
            raise SystemExit(_exit_code(error.returncode)) from None

    return simple_launcher


def _plain(original: Any, settings: Settings) -> Any:
    """Make a launcher of several processes exit with their exit code instead of a traceback."""

    @wraps(original)
    def launcher(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            return original(*args, **kwargs)
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None
        except ChildFailedError as error:
            rank, failed = error.get_first_failure()
            if failed.exitcode < 0:  # the process could not print why it ended
                print_error(f"{ranks.name(rank)} (process {failed.pid}) was ended by {_signal_name(failed.exitcode)}")
            raise SystemExit(_exit_code(failed.exitcode)) from None

    return launcher


def _exit_code(code: int) -> int:
    """Return the exit code that a shell reports for ``code``; a negative code is a signal number."""
    return code if code >= 0 else 128 - code


def _gentle(original: Any, settings: Settings) -> Any:
    """Make the agent wait for all processes when it stops them because of a signal, which is then its argument."""

    @wraps(original)
    def _shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        processes = self._pcontext
        if args and processes is not None:
            close = processes.close
            processes.close = lambda *ignored, **too: close(signal.SIGTERM, timeout=_SHUTDOWN_TIMEOUT)
        return original(self, *args, **kwargs)

    return _shutdown


def _telling(original: Any, settings: Settings) -> Any:
    """Publish the failure of a process of this machine, before the launcher ends the others."""

    @wraps(original)
    def close(self: Any, *args: Any, **kwargs: Any) -> Any:
        failures = getattr(self, "_failures", None)
        if failures and not args and not kwargs:
            first = next(iter(failures.values()))
            _publish(self.envs[first.local_rank], first.exitcode)
        return original(self, *args, **kwargs)

    return close


def _publish(environment: Mapping[str, str], code: int) -> None:
    rank = int(environment.get("RANK", -1))
    how = f"ended by {_signal_name(code)}" if code < 0 else f"ended with exit code {code}"
    # The store may be on another machine that has failed. If that one restarts, its next store must not get this failure.
    with suppress(KeyError, ValueError, RuntimeError):
        ranks.publish(ranks.store(environment, _PUBLISHING_TIMEOUT), ranks.Failure(f"{ranks.name(rank)}: {how}", rank))


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


@contextmanager
def pass_signals_on(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward SIGTERM and Ctrl-C to a process as SIGTERM while this process waits for it. Yield those that have come."""
    came: list[int] = []

    def send(number: int, frame: FrameType | None) -> None:
        came.append(number)
        _ask_to_stop(process)

    before = {number: signal.signal(number, send) for number in _STOPS}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait(process: subprocess.Popen[bytes]) -> tuple[int, int | None]:
    """Wait for a process and pass signals on to it. Return its exit code, as of a shell, and the first signal, if one came.

    A process that had no handler yet was ended by the signal that was passed on, and not by the one that came.
    """
    with pass_signals_on(process) as came:
        code = process.wait()
    stop = next(iter(came), None)
    return (128 + stop if stop is not None and code < 0 else _exit_code(code)), stop


def _pass_on(number: int, frame: FrameType | None) -> None:
    import psutil  # accelerate needs it

    for child in psutil.Process().children():
        _ask_to_stop(child)


def _ask_to_stop(process: Any) -> None:
    """Send SIGTERM, which makes the training process save and exit. It has already received a terminal's Ctrl-C.

    Do nothing on Windows: ``terminate`` kills the process there, and Ctrl-C reaches all processes of the console.
    """
    if _HAS_SIGTERM:
        process.terminate()


def _without_libuv(original: Any, settings: Settings) -> Any:
    """Make the key-value store of several processes one that torch's wheels for Windows have.

    With the store of a launcher, torch itself ignores USE_LIBUV, and the URL with which sd-scripts sets it.
    """

    @wraps(original)
    def store(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"use_libuv": False, **kwargs})

    return store


_RENDEZVOUS = ("elastic.rendezvous.static_tcp_rendezvous", "elastic.rendezvous.c10d_rendezvous_backend", "rendezvous")
"""Modules of torch that create a store: of the launcher, the last one of its processes."""

_ON_WINDOWS = tuple(
    Target(f"torch.distributed.{module}", "TCPStore", _without_libuv, optional=True, body="runs") for module in _RENDEZVOUS
)

_LAUNCHERS = (("simple_launcher", _patient), ("multi_gpu_launcher", _plain), ("deepspeed_launcher", _plain))

PATCH = Patch(
    name="launcher_signals",
    summary="`accelerate launch` passes signals on, waits for the training process, and has its exit code",
    targets=(
        *(Target("accelerate.commands.launch", name, replace, optional=True, body="runs") for name, replace in _LAUNCHERS),
        Target(
            "torch.distributed.elastic.agent.server.local_elastic_agent",
            "LocalElasticAgent._shutdown",
            _gentle,
            optional=True,
            body="runs",
        ),
        Target("torch.distributed.elastic.multiprocessing.api", "PContext.close", _telling, optional=True, body="runs"),
        *(_ON_WINDOWS if os.name == "nt" else ()),
    ),
    exactness="exact",
    held_to="the launcher without it, when no signal comes and no process fails",
    idea="https://github.com/huggingface/accelerate/blob/main/src/accelerate/commands/launch.py",
)


def _variables(system: str) -> dict[str, str]:
    """Return the variables that the processes of a run need on a system.

    The processes connect to the launcher's store, on Windows without libuv. There sd-scripts chooses gloo.
    """
    return {"USE_LIBUV": "0"} if system == "nt" else {}


@cache
def arm() -> None:
    """Apply it in a process that is a launcher and imports no sd-scripts."""
    drop_unwritable()
    replace_unencodable()
    for name, value in _variables(os.name).items():
        os.environ.setdefault(name, value)
    Patcher({}, Settings(), None, (PATCH,)).arm()
