"""Finish the step and save model and state on Ctrl-C, SIGTERM, a stop file or the end of the launcher.

Upstream has no signal handler and loses the steps since the last ``--save_every_n_steps``. SIGTERM to ``accelerate launch``
ends only the launcher, and the training process keeps running.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

from kohya_ext.config.settings import Option, Settings, path
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import stop_request

#: Read at import, to notice a launcher that ends while the script is still importing.
_PARENT = os.getppid()

_PR_SET_PDEATHSIG = 1

STOP_FILE = Option[Path | None](
    "stop_file",
    None,
    path,
    "finish the step, save model and state, and stop when this file appears; default: OUTPUT_NAME.stop in --output_dir",
    metavar="FILE",
)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> stop_request.Stopper:
    launched = _is_launcher(_PARENT)
    stopper = stop_request.start(args, accelerator, settings, _PARENT if launched else 0)
    if launched:
        _end_with_parent()
    return stopper


def _is_launcher(process: int) -> bool:
    """Return whether a process is a launcher, whose end stops the run; the end of a shell does not."""
    import psutil  # accelerate needs it

    try:
        words = psutil.Process(process).cmdline()
    except psutil.Error:
        return False
    # kohya_ext itself is a launcher with --on_oom retry, which waits for the run.
    known = ("accelerate", "torchrun", "torch.distributed")
    return "kohya_ext" in words[1:4] or any(name in word for name in known for word in words[:4])


def _end_with_parent() -> None:
    """Request SIGTERM from the Linux kernel when the parent ends; other systems check after each step."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != _PARENT:  # it ended before the call
            os.kill(os.getpid(), signal.SIGTERM)


PATCH = Patch(
    name="safe_stop",
    summary="on Ctrl-C, SIGTERM or a stop file, finish the step, save model and state, and print the command to resume",
    targets=(),
    options=(STOP_FILE,),
    exactness="exact",
    held_to="the same steps of an uninterrupted run",
    idea="https://github.com/kohya-ss/sd-scripts/issues/582",
    stage=Stage.STOP,
    on_start=_start,
    in_dry_runs=False,  # the integer that the processes exchange would come back as a length of captions
    only_trains=True,
)
