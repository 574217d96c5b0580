"""End all processes of a run when one of them fails, on every machine.

Without it the others wait in a collective operation: until the launcher of their machine kills them after 30 seconds, or on
another machine until --ddp_timeout.
"""

from __future__ import annotations

import os
from argparse import Namespace

from kohya_ext.config.settings import Settings
from kohya_ext.console import warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> ranks.FailureWatch | None:
    if accelerator.num_processes == 1:
        return None
    try:
        watch = ranks.FailureWatch(accelerator, ranks.store(os.environ))
    except (KeyError, ValueError, RuntimeError) as problem:  # started in another way than by accelerate or torchrun
        warn(f"a failed process is noticed only after --ddp_timeout: {type(problem).__name__}: {problem}")
        return None
    watch.listen()
    return watch


PATCH = Patch(
    name="rank_failures",
    summary="with several processes, end all of them on all machines when one fails",
    targets=(),
    exactness="exact",
    held_to="the same run without the patch, when no process fails",
    idea="https://pytorch.org/docs/stable/elastic/errors.html",
    stage=Stage.OBSERVE,
    on_start=_start,
)
