"""Warn on Windows and WSL if steps are slow because GPU memory has spilled to system memory.

NVIDIA's driver has spilled silently since version 536.40; 53 to 66 seconds per step instead of 1.1 were reported.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass

from kohya_ext.config.command_line import restart_line
from kohya_ext.config.settings import Settings
from kohya_ext.console import note
from kohya_ext.gpu import spill
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import journal
from kohya_ext.units import index_of


@dataclass
class _Clock(TrainingCallback):
    watch: spill.SpillDetector
    index: int
    began: float | None = None
    warned: bool = False

    def before_batch(self, accelerator: Accelerator) -> None:
        if self.began is None:
            self.began = time.monotonic()

    def after_batch(self, accelerator: Accelerator) -> None:
        if self.warned or self.began is None or not accelerator.sync_gradients:
            return
        import torch

        # Time from the end of one step to the end of the next; the script waits for the GPU once in between, to read the loss.
        now = time.monotonic()
        seconds, self.began = now - self.began, now
        free, _ = torch.cuda.mem_get_info(self.index)
        problem = self.watch.after_step(seconds, torch.cuda.memory_reserved(self.index), free)
        if problem is not None:
            command = restart_line({"vram_budget": "auto", "resume": "auto"})
            note(f"warning: {problem}. Press Ctrl-C to save and stop, then resume within GPU memory: {command}")
            journal.event("spill", problem=problem)
            self.warned = True


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Clock | None:
    if accelerator.device.type != "cuda" or not spill.may_spill():
        return None
    import torch

    index = index_of(accelerator.device)
    return _Clock(spill.SpillDetector(torch.cuda.get_device_properties(index).total_memory), index)


PATCH = Patch(
    name="spill_watch",
    summary="warn on Windows and WSL if steps are slow because GPU memory has spilled to system memory",
    targets=(),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://nvidia.custhelp.com/app/answers/detail/a_id/5490",
    stage=Stage.OBSERVE,
    on_start=_start,
    observes=True,
)
