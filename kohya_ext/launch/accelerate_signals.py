"""``accelerate launch`` that passes signals on and waits, where the environment arms the extension in the launcher too.

As it comes, SIGTERM ends the launcher alone, and Ctrl-C ends it with a traceback while the training process is still saving.
With several processes torch's elastic agent passes the signal on, after a terminal's Ctrl-C as a second one, which would kill,
and kills what has not ended after 30 seconds, less than a large model takes to be saved.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import FrameType
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch, Patcher, Target

_HAS_SIGTERM = os.name == "posix"

_PATIENCE = 24 * 3600
"""Seconds that processes which were told to stop may take; whoever cannot wait sends the signal again."""


def _patient(original: Any, settings: Settings) -> Any:
    @wraps(original)
    def simple_launcher(*args: Any, **kwargs: Any) -> Any:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _pass_on)
        try:
            return original(*args, **kwargs)
        except subprocess.CalledProcessError as error:
            # The script has said what was wrong; its exit code says more than a traceback of its launcher.
            raise SystemExit(_exit_code(error.returncode)) from None

    return simple_launcher


def _plain(original: Any, settings: Settings) -> Any:
    """For a launcher of several processes: their exit code instead of a traceback."""

    @wraps(original)
    def launcher(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            return original(*args, **kwargs)
        except SignalException as error:
            raise SystemExit(128 + error.sigval) from None
        except ChildFailedError as error:
            raise SystemExit(_exit_code(error.get_first_failure()[1].exitcode)) from None

    return launcher


def _exit_code(code: int) -> int:
    """What a shell would say of a process that ended with ``code``; negative is a signal's number."""
    return code if code > 0 else 128 - code


def _gentle(original: Any, settings: Settings) -> Any:
    """For the agent's end of all processes: when it was told to stop (it names the signal then), they are waited for."""

    @wraps(original)
    def _shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        processes = self._pcontext
        if args and processes is not None:
            close = processes.close
            processes.close = lambda *ignored, **too: close(signal.SIGTERM, timeout=_PATIENCE)
        return original(self, *args, **kwargs)

    return _shutdown


@contextmanager
def pass_signals_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While a process is waited for: end it with SIGTERM when this one is sent it or Ctrl-C, and go on waiting."""

    def send(number: int, frame: FrameType | None) -> None:
        _ask_to_stop(process)

    before = {number: signal.signal(number, send) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, frame: FrameType | None) -> None:
    import psutil  # accelerate needs it

    for child in psutil.Process().children():
        _ask_to_stop(child)


def _ask_to_stop(process: Any) -> None:
    """Send SIGTERM, at which the training process saves. A terminal's Ctrl-C has reached it already; a second one would kill.

    Windows has no such signal: ``terminate`` kills there, and Ctrl-C reaches every process of the console.
    """
    if _HAS_SIGTERM:
        process.terminate()


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
    ),
    exactness="exact",
    held_to="the launcher without it, when no signal comes and no process fails",
    idea="https://github.com/huggingface/accelerate/blob/main/src/accelerate/commands/launch.py",
)


@cache
def arm() -> None:
    """Apply it in a process that is a launcher and imports no sd-scripts."""
    Patcher({}, Settings(), None, (PATCH,)).arm()
