"""Save model and state of the last complete step after any exception in the training loop, which then ends the run as before.

Upstream ends with a traceback and loses the steps since the last save: after a deleted image, a tracker whose folder is gone or
an error while it samples. See :mod:`kohya_ext.run.last_step` for the contents, and `out_of_memory` for the advice after that
error.
"""

from __future__ import annotations

from argparse import Namespace

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage
from kohya_ext.patching.types import Accelerator
from kohya_ext.run.last_step import LastStep
from kohya_ext.sdscripts.constraints import stepping_in_backward


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> LastStep:
    return LastStep(args, accelerator, stepping_in_backward(args, settings) is not None)


PATCH = Patch(
    name="save_on_failure",
    summary="after any exception in the training loop, save the model and the state of the last complete step",
    targets=(),
    exactness="exact",
    held_to="the same run without the patch; resumed from the saved state, the uninterrupted run",
    idea="https://github.com/kohya-ss/sd-scripts/issues/1999",
    stage=Stage.SAVE,
    on_start=_start,
    only_trains=True,
)
