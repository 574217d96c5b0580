"""``--on_oom retry``: start the script in a process of its own, and anew with the next rung when it runs out of memory.

A process that was out of memory is no place to go on in: its allocator is full of pieces. So the launcher stays small (it
imports no torch), waits, and passes signals on; the training process saves its state, hands over what to change, and ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_ext.config.command_line import CommandLine, option_words, quoted
from kohya_ext.console import note
from kohya_ext.launch.accelerate_signals import pass_signals_on

#: Tells the training process that somebody waits for it, and where to say what to change.
FILE = "KOHYA_EXT_OUT_OF_MEMORY_FILE"


def handed_over() -> Path | None:
    """Return the file in which a training process says what to change; None when nobody would start it anew."""
    file = os.environ.get(FILE)
    return Path(file) if file else None


def supervise(command: CommandLine) -> int:
    """Run a command line; when it is out of memory, run it again with other arguments, at most ``--oom_max_retries`` times.

    Return the exit code of the last run, 128 + N if signal N ended it.
    """
    settings = command.settings
    if settings.save_state_every_n_minutes is None:
        note(
            "--on_oom retry: the state is saved when forward or backward run out of memory; for what cannot be saved then "
            "(the optimizer's step), --save_state_every_n_minutes 10 keeps one"
        )
    for restart in range(settings.oom_max_retries + 1):
        code, found = _run([*command.launcher, str(command.script), *command.argv])
        if not found:
            return code
        if restart == settings.oom_max_retries:
            note(f"out of memory after {restart} restarts, the most that --oom_max_retries allows")
            return code
        state = found["state"]
        place = "from the beginning" if state is None else f"from {Path(state).name}"
        changes = {**found["changes"], "resume": state}
        command = command.with_(changes)
        words = quoted(option_words(changes))
        note(f"restart {restart + 1} of {settings.oom_max_retries}, {place}, with {found['what']}: {words}")
    raise AssertionError("the last round returns")


def _run(words: Sequence[str]) -> tuple[int, Mapping[str, Any]]:
    """Run the launcher once in a process of its own; return its exit code and what to change, nothing unless out of memory."""
    with tempfile.TemporaryDirectory(prefix="kohya_ext-") as folder:
        file = Path(folder) / "out_of_memory.json"
        process = subprocess.Popen([sys.executable, *words], env={**os.environ, FILE: str(file)})
        with pass_signals_on(process):
            code = process.wait()
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return (code if code >= 0 else 128 - code), found
