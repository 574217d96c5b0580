"""``accelerate launch`` that passes signals on and waits, where the environment arms the extension in the launcher too.

As it comes, SIGTERM ends the launcher alone, and Ctrl-C ends it with a traceback while the training process is still saving.
With several processes torch's elastic agent does the job itself.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType, ModuleType
from typing import Any

import wrapt


def watch() -> None:
    """Mend the launcher when it is imported, which only ``accelerate`` itself does."""
    wrapt.register_post_import_hook(_on_launch, "accelerate.commands.launch")


def _on_launch(module: ModuleType) -> None:
    if hasattr(module, "simple_launcher"):
        setattr(module, "simple_launcher", _patient(module.simple_launcher))  # noqa: B010


def _patient(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def simple_launcher(*args: Any, **kwargs: Any) -> Any:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _pass_on)
        try:
            return original(*args, **kwargs)
        except subprocess.CalledProcessError as error:
            # The script has said what was wrong; its exit code says more than a traceback of its launcher.
            raise SystemExit(error.returncode if error.returncode > 0 else 128 - error.returncode) from None

    return simple_launcher


@contextmanager
def pass_signals_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While a process is waited for: end it with SIGTERM when this one is sent it or Ctrl-C, and go on waiting."""

    def send(number: int, frame: FrameType | None) -> None:
        process.terminate()  # a terminal's Ctrl-C has reached it already; a second one would kill it

    before = {number: signal.signal(number, send) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send SIGTERM to the training process. A terminal's Ctrl-C has reached it already; a second one would kill it."""
    import psutil  # accelerate needs it

    for child in psutil.Process().children():
        child.terminate()
