"""Notify the user of a run's end and problems: run a command, or POST JSON to a URL.

Messages are delivered by a thread, so no step waits for them. Neither the command nor the URL, which may contain a token, is
part of any message.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kohya_ext import __version__
from kohya_ext.console import warn
from kohya_ext.run.step_times import format_duration

POST_SECONDS = 5.0
"""Time limit of each operation of a POST."""

COMMAND_SECONDS = 30.0
"""Time limit of a command, which is then ended."""

LAST_SECONDS = 10.0
"""How long the end of the run waits for messages that are still to be delivered."""

SKIP_SECONDS = 600.0
"""Shortest time between two messages about skipped steps; the steps in between are counted."""

PREFIX = "KOHYA_NOTIFY_"
"""Start of the names of a command's environment variables."""


@dataclass
class Notifier:
    """Turns lines of the journal into messages, and delivers them."""

    target: str
    """A command for the shell, or a URL."""
    _start: Mapping[str, Any] = field(default_factory=dict)
    _training: Mapping[str, Any] = field(default_factory=dict)
    _step: Mapping[str, Any] = field(default_factory=dict)
    _check: Mapping[str, Any] = field(default_factory=dict)
    _last_skip: float = -SKIP_SECONDS
    _skips: int = 0
    """Steps skipped since the last message about them."""
    _failed: bool = False
    """Whether a message was not delivered, which is reported once."""
    _messages: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)  # put() is reentrant
    _thread: threading.Thread | None = None

    def open(self) -> None:
        """Start the thread; not later, because Python 3.12.1 starts none in exit handlers."""
        self._thread = threading.Thread(target=self._deliver_all, name="kohya_ext notifications", daemon=True)
        self._thread.start()

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Queue a message if a line of the journal needs one."""
        kind = line["kind"]
        if kind == "start":
            self._start = line
        elif kind == "training":
            self._training = line
        elif kind == "step":
            self._step = line
        elif kind == "check":
            self._check = line
        elif kind == "spill":
            self._put("spill", line, f"slow steps: {line.get('problem')}")
        elif kind == "skip":
            self._skips += 1
            if line["time"] - self._last_skip >= SKIP_SECONDS:
                steps = f"step {line.get('step')} skipped" if self._skips == 1 else f"{self._skips} steps skipped"
                self._last_skip, skipped, self._skips = line["time"], self._skips, 0
                self._put("skip", line, f"{steps}, because loss or gradient is not finite", skipped=skipped)
        elif kind == "end":
            self._put(str(line["status"]), line, self._end(line))

    def _end(self, line: Mapping[str, Any]) -> str:
        total = self._training.get("steps")
        reason = f" ({line['reason']})" if line.get("reason") else ""
        parts = [f"{line['status']}{reason} at step {line.get('step')}" + (f" of {total}" if total else "")]
        if began := self._training.get("time"):
            parts[0] += f" after {format_duration(line['time'] - began)}"
        if (loss := self._step.get("loss")) is not None:
            parts.append(f"loss {loss:.4g}")
        parts += self._check.get("problems", ())
        return "; ".join(parts)

    def _put(self, event: str, line: Mapping[str, Any], text: str, **more: Any) -> None:
        text = f"{self._start.get('name')}: {text}"
        self._messages.put(
            {
                "event": event,
                "text": text,  # Slack and Mattermost show this key, Discord the next
                "content": text,
                "name": self._start.get("name"),
                "script": self._start.get("script"),
                "host": self._start.get("host"),
                "time": line["time"],
                "step": line.get("step"),
                "steps": self._training.get("steps"),
                "loss": self._step.get("loss"),
                "reason": line.get("reason") or line.get("problem") or "",
                "problems": list(self._check.get("problems", ())),
                **more,
            }
        )

    def close(self) -> None:
        """Wait until all messages are delivered, at most :data:`LAST_SECONDS`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._messages.put(None)
        thread.join(LAST_SECONDS)
        if thread.is_alive():
            warn(f"--notify: the last message was not delivered within {LAST_SECONDS:.0f} s")

    def _deliver_all(self) -> None:
        while (message := self._messages.get()) is not None:
            problem = deliver(self.target, message)
            if problem and not self._failed:
                self._failed = True
                warn(f"--notify: a message was not delivered: {problem}")


def is_url(target: str) -> bool:
    """Return whether a target is a URL instead of a command."""
    return target.lower().startswith(("http://", "https://"))


def deliver(target: str, message: Mapping[str, Any]) -> str:
    """Deliver a message; return why that failed, without the target, or an empty text."""
    content = json.dumps(message).encode()
    try:
        return _post(target, content) if is_url(target) else _run(target, message, content)
    except Exception as error:  # its text may contain the target
        return type(error).__name__


def _post(url: str, content: bytes) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": f"kohya_ext/{__version__}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=POST_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"the server answered with status {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
        return str(reason.strerror or type(reason).__name__) if isinstance(reason, OSError) else type(error).__name__


def _run(command: str, message: Mapping[str, Any], content: bytes) -> str:
    values = {f"{PREFIX}{key.upper()}": str(message[key]) for key in ("event", "name", "step", "steps", "text")}
    own_group = os.name == "posix"  # so that Ctrl-C does not reach it, and it can be ended with its children
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **values},
        start_new_session=own_group,
    )
    try:
        process.communicate(content, timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        if own_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
        return f"the command took more than {COMMAND_SECONDS:.0f} s and was ended"
    return f"the command ended with exit code {process.returncode}" if process.returncode else ""
