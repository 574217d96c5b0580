"""``--save_state_every_n_minutes N``: a full state every N minutes, of which the newest few are kept.

What a signal cannot announce, SIGKILL (the stop button of the kohya_ss GUI) and a power cut, then costs N minutes at most. A
state is written beside and renamed, and an old one goes only when the new one is whole (see atomic_saves).
"""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_ext.config.settings import Settings
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.run import resume, run_record
from kohya_ext.run.atomic_write import DiskFullError, fail_fast, remove_atomically
from kohya_ext.run.output_files import DEFAULT_NAME, ROLLING, rolling_state, states


@dataclass
class _Rolling(TrainingCallback):
    folder: Path
    name: str
    every: float
    """Seconds."""
    keep: int
    step: int = 0
    """Steps of this process, for the name where exact_resume is off and nothing counts those before a resume."""
    saved: list[Path] | None = None
    """This run's timed states, the oldest first: those of the processes that it continues, too."""
    last: float = field(default_factory=time.monotonic)

    def after_batch(self, accelerator: Any) -> None:
        if not accelerator.sync_gradients:
            return
        self.step += 1
        if not self._is_due(accelerator):
            return
        accelerator.wait_for_everyone()
        if (current := resume.position()) is not None:
            current.gather()
        sharded = str(accelerator.distributed_type).rpartition(".")[2] in ("DEEPSPEED", "FSDP")
        if accelerator.is_main_process or sharded:
            self._save(accelerator)
        self.last = time.monotonic()

    def _is_due(self, accelerator: Any) -> bool:
        due = time.monotonic() - self.last >= self.every
        if accelerator.num_processes == 1:
            return due
        import torch

        # The clocks of two processes do not agree: the first one's counts.
        return bool(accelerator.gather(torch.tensor([due], device=accelerator.device, dtype=torch.int32))[0].item())

    def _save(self, accelerator: Any) -> None:
        current = resume.position()
        step = current.step if current is not None else self.step
        state = rolling_state(self.folder, self.name, step)
        if self.saved is None:
            self.saved = self._inherited()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            # Training is worth more than this state: a full disk is not waited for.
            with fail_fast(), current.preserving_random_state() if current is not None else contextlib.nullcontext():
                accelerator.save_state(str(state))
        except DiskFullError as error:
            warn(f"{error}; training goes on without this state")
            return
        self.saved = [*(path for path in self.saved if path != state), state]
        while len(self.saved) > self.keep:
            old = self.saved.pop(0)
            if old.is_dir():
                remove_atomically(old)
        note(f"state of step {step} saved: {state}")

    def _inherited(self) -> list[Path]:
        """Return the timed states of the run that this process continues, the oldest first. Another run's are not touched."""
        run = run_record.current()
        rolling = [path for path in states(self.folder, self.name) if f"-{ROLLING}" in path.name]
        records = [
            (record.saved, path) for path in rolling if (record := run_record.read(path)) and run and record.id == run.id
        ]
        return [path for _, path in sorted(records)]


def _start(args: Namespace, accelerator: Any, settings: Settings) -> _Rolling:
    minutes = settings.save_state_every_n_minutes or 0.0
    return _Rolling(
        Path(args.output_dir or "."), args.output_name or DEFAULT_NAME, minutes * 60, settings.save_last_n_timed_states
    )


PATCH = Patch(
    name="rolling_states",
    summary="a full state every --save_state_every_n_minutes, the newest --save_last_n_timed_states are kept",
    targets=(),
    exactness="exact",
    held_to="the same run without it",
    idea="https://github.com/kohya-ss/sd-scripts/issues/582",
    wanted=lambda settings: settings.save_state_every_n_minutes is not None,
    stage=Stage.SAVE,
    on_start=_start,
)
