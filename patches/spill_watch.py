"""On Windows and WSL: a run that is slow because its memory has spilled to the host is told so.

NVIDIA's driver does it silently since version 536.40; 53 to 66 seconds a step instead of 1.1 were seen.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from kohya_ext.config.command_line import restart_line
from kohya_ext.config.settings import Settings
from kohya_ext.console import warn
from kohya_ext.gpu import spill
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.units import index_of


@dataclass
class _Clock(TrainingCallback):
    watch: spill.SpillDetector
    card: int
    began: float | None = None
    warned: bool = False

    def before_batch(self, accelerator: Any) -> None:
        if self.began is None:
            self.began = time.monotonic()

    def after_batch(self, accelerator: Any) -> None:
        if self.warned or self.began is None or not accelerator.sync_gradients:
            return
        import torch

        # From one step's end to the next one's: the script waits for the GPU once in between, to read the loss.
        now = time.monotonic()
        seconds, self.began = now - self.began, now
        free, _ = torch.cuda.mem_get_info(self.card)
        wrong = self.watch.after_step(seconds, torch.cuda.memory_reserved(self.card), free)
        if wrong is not None:
            go_on = restart_line({"vram_budget": "auto", "resume": "auto"})
            warn(f"{wrong}. Ctrl-C saves what was trained; to go on within the card: {go_on}")
            self.warned = True


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Clock | None:
    if accelerator.device.type != "cuda" or not spill.may_spill():
        return None
    import torch

    card = index_of(accelerator.device)
    return _Clock(spill.SpillDetector(torch.cuda.get_device_properties(card).total_memory), card)


PATCH = Patch(
    name="spill_watch",
    summary="Windows, WSL: name it when steps are slow because memory of the run has spilled from the card to the host",
    targets=(),
    exactness="exact",
    held_to="the same run without it",
    idea="https://nvidia.custhelp.com/app/answers/detail/a_id/5490",
    stage=Stage.OBSERVE,
    on_start=_start,
)
