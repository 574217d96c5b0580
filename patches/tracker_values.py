"""Send memory and times of each step to the trackers that the script has created with --log_with.

The values are those of the journal's line for the step, so a step does not wait for the GPU. Upstream's own values are
unchanged: TensorBoard gets others at the same step, and Weights & Biases gets them in the row that upstream is writing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal
from kohya_ext.units import GB

_NAMES = {
    **{name: f"memory/{name}_GB" for name in ("allocated", "reserved", "peak_allocated", "peak_reserved")},
    "seconds": "seconds/step",
    "data": "seconds/waiting_for_data",
    "outside": "seconds/between_steps",
}
"""Key in the journal -> name in the trackers."""


@dataclass
class _Tracking(TrainingCallback):
    accelerator: Accelerator

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Send the values of a step."""
        if line["kind"] != "step" or not self.accelerator.trackers:
            return
        values = {label: line[key] / GB if "memory" in label else line[key] for key, label in _NAMES.items() if key in line}
        try:
            for tracker in self.accelerator.trackers:
                # A step or a commit would end the row, and upstream's next values for it would be dropped.
                place = {"commit": False} if tracker.name == "wandb" else {"step": line["step"]}
                tracker.log(values, **place)
        except Exception as problem:  # as upstream's next call will, if the tracker is at fault
            warn(f"memory and times are not sent to the trackers: {type(problem).__name__}: {problem}")
            self.on_end()

    def on_end(self) -> None:
        journal.stop_listening(self.on_line)


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Tracking | None:
    if not accelerator.is_main_process:
        return None
    tracking = _Tracking(accelerator)
    journal.listen(tracking.on_line)
    return tracking


PATCH = Patch(
    name="tracker_values",
    summary="send memory and times of each step to the trackers of --log_with",
    targets=(),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://huggingface.co/docs/accelerate/usage_guides/tracking",
    stage=Stage.WRITE,
    on_start=_start,
    observes=True,
)
