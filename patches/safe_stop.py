"""Ctrl-C, SIGTERM, a stop file and the end of the launcher stop a run after its step, with model and state saved.

Upstream has no handler: what was trained since the last ``--save_every_n_steps`` is lost. And SIGTERM to ``accelerate launch``
ends the launcher alone; the training process goes on without it.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Option, Settings, path
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage
from kohya_ext.run import stop_request

#: Taken as early as possible: a launcher that ends while the script is still importing is noticed too.
_PARENT = os.getppid()

_PR_SET_PDEATHSIG = 1

STOP_FILE = Option[Path | None](
    "stop_file",
    None,
    path,
    "stop after the current step, model and state saved, when this file appears; default: OUTPUT_NAME.stop in --output_dir",
    metavar="FILE",
)


def _start(args: Namespace, accelerator: Any, settings: Settings) -> stop_request.Stopper:
    launched = _is_launcher(_PARENT)
    stopper = stop_request.start(args, accelerator, settings, _PARENT if launched else 0)
    if launched:
        _end_with_parent()
    return stopper


def _is_launcher(process: int) -> bool:
    """Whether a process is a launcher. A shell may well end before its run does; they may not."""
    import psutil  # accelerate needs it

    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return False
    # Also this package's own launcher, where it waits for the run (--on_oom retry).
    known = ("accelerate", "torchrun", "torch.distributed")
    return "kohya_ext" in words[1:4] or any(name in word for name in known for word in words[:4])


def _end_with_parent() -> None:
    """Have the system send SIGTERM when the parent ends, on Linux; elsewhere the end of each step finds out."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != _PARENT:  # it ended before that
            os.kill(os.getpid(), signal.SIGTERM)


PATCH = Patch(
    name="safe_stop",
    summary="Ctrl-C, SIGTERM or a stop file: finish the step, save model and state, say how to go on",
    targets=(),
    options=(STOP_FILE,),
    exactness="exact",
    held_to="the same steps of a run that is not stopped",
    idea="https://github.com/kohya-ss/sd-scripts/issues/582",
    stage=Stage.STOP,
    on_start=_start,
)
