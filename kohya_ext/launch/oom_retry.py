"""``--on_oom retry``: run the script in a child process, and restart it with a memory saving when it runs out of memory.

After an out-of-memory error the allocator is fragmented, so training continues in a fresh process. The launcher stays small
(it does not import torch), waits, and forwards signals. The training process saves its state, writes the required changes to
a file, and exits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kohya_ext.config.command_line import CommandLine, option_words, quoted
from kohya_ext.console import note
from kohya_ext.launch.accelerate_signals import wait
from kohya_ext.run import retry_request
from kohya_ext.run.retry_request import RetryRequest


def supervise(command: CommandLine) -> int:
    """Run a command line; when it is out of memory, run it again with other arguments, at most ``--oom_max_retries`` times.

    Return the exit code of the last run, 128 + N if signal N ended it.
    """
    settings = command.settings
    if settings["save_state_every_n_minutes"] is None:
        note(
            "--on_oom retry: the state cannot be saved when the optimizer step runs out of memory; "
            "add --save_state_every_n_minutes 10 to restart from a recent state"
        )
    most = settings["oom_max_retries"]
    for restart in range(most + 1):
        code, request = _run([*command.launcher, str(command.script), *command.argv])
        if request is None:
            return code
        if restart == most:
            note(f"out of memory after {restart} restarts; --oom_max_retries allows no more")
            return code
        state = request["state"]
        position = "from the beginning" if state is None else f"from {Path(state).name}"
        changes = {**request["changes"], "resume": state}
        command = command.with_(changes)
        words = quoted(option_words(changes))
        note(f"restart {restart + 1} of {most}, {position}, with {request['description']}: {words}")
    raise AssertionError("the last round returns")


def _run(words: Sequence[str]) -> tuple[int, RetryRequest | None]:
    """Run the launcher in a child process; return its exit code and the restart that it requests when out of memory."""
    with tempfile.TemporaryDirectory(prefix="kohya_ext-", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "out_of_memory.json"
        process = subprocess.Popen([sys.executable, *words], env={**os.environ, retry_request.VARIABLE: str(file)})
        code, stop = wait(process)
        request = retry_request.read(file) if stop is None else None  # the user has stopped the run
    return code, request
