"""End a process whose GPU does not answer, and keep later runs from what has hung it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kohya_ext.compiling import replay_watch
from kohya_ext.config.command_line import restart_line
from kohya_ext.console import error
from kohya_ext.run import journal, resume


def end_process(args: Any, device: Any) -> None:
    """Print what has happened and how to resume, and end the process."""
    try:
        _report(args, device)
    finally:
        os._exit(1)


def _report(args: Any, device: Any) -> None:
    import torch

    gpu = torch.cuda.get_device_name(device)
    minutes = replay_watch.INTERVAL * replay_watch.LOOKS / 60
    error(f"a replay of CUDA graphs has not ended for {minutes:.0f} minutes: the {gpu} or its driver hangs; ending the run")
    file = replay_watch.forbid(gpu, f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    error(f"later runs on this GPU train without CUDA graphs, because of {file}")
    state = resume.newest_state(Path(args.output_dir), args.output_name)
    error(f"to resume from {state.name}: {restart_line({'resume': str(state)})}" if state else "this run has saved no state")
    journal.event("hang", problem="a replay of CUDA graphs has not ended")
    journal.set_exit_code(1)
    journal.finish()
