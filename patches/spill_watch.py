"""On Windows and WSL: a run that is slow because its memory has spilled to the host is told so.

NVIDIA's driver does it silently since version 536.40; 53 to 66 seconds a step instead of 1.1 were seen.
"""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from kohya_ext.console import warn
from kohya_ext.loop import around_batch, on_start
from kohya_ext.patching import Patch
from kohya_ext.retyping import again
from kohya_ext.settings import Settings
from kohya_ext.vram import spill
from kohya_ext.vram.card import index_of


@dataclass
class _Clock:
    watch: spill.Watch
    card: int
    began: float | None = None


_clock: _Clock | None = None


def _start(args: Namespace, accelerator: Any, settings: Settings) -> None:
    global _clock
    if accelerator.device.type == "cuda" and spill.may_spill():
        import torch

        card = index_of(accelerator.device)
        _clock = _Clock(spill.Watch(torch.cuda.get_device_properties(card).total_memory), card)


def _before(accelerator: Any) -> None:
    if _clock is not None and _clock.began is None:
        _clock.began = time.monotonic()


def _after(accelerator: Any) -> None:
    global _clock
    if _clock is None or _clock.began is None or not accelerator.sync_gradients:
        return
    import torch

    # From one step's end to the next one's: the script waits for the GPU once in between, to read the loss.
    now = time.monotonic()
    seconds, _clock.began = now - _clock.began, now
    free, _ = torch.cuda.mem_get_info(_clock.card)
    wrong = _clock.watch.after_step(seconds, torch.cuda.memory_reserved(_clock.card), free)
    if wrong is not None:
        go_on = again({"vram_budget": "auto", "resume": "auto"})
        warn(f"{wrong}. Ctrl-C saves what was trained; to go on within the card: {go_on}")
        _clock = None


PATCH = Patch(
    name="spill_watch",
    summary="Windows, WSL: name it when steps are slow because memory of the run has spilled from the card to the host",
    targets=(*on_start(_start), around_batch(_before, _after)),
    exactness="exact",
    held_to="the same run without it",
    idea="https://nvidia.custhelp.com/app/answers/detail/a_id/5490",
)
