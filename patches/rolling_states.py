"""Save a full state every N minutes (``--save_state_every_n_minutes``) and keep the newest ones.

SIGKILL (the stop button of the kohya_ss GUI) and power cuts then cost N minutes at most. A state is written to a temporary
folder and renamed. An old state is deleted only after the new one is complete (see atomic_saves).
"""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from kohya_ext.config.settings import Option, Settings, count, minutes
from kohya_ext.console import note, warn
from kohya_ext.patching.patch import Patch
from kohya_ext.patching.training_loop import Stage, TrainingCallback
from kohya_ext.patching.types import Accelerator
from kohya_ext.run import ranks, resume, run_record
from kohya_ext.run.atomic_write import fail_fast, remove_atomically
from kohya_ext.run.output_files import ROLLING, output_name, rolling_state, states

SAVE_STATE_EVERY_N_MINUTES = Option[float | None](
    "save_state_every_n_minutes",
    None,
    minutes,
    "save the full state every this many minutes, so that a kill or power cut loses no more; 0 saves after every step",
    metavar="MINUTES",
    activates=True,
)
SAVE_LAST_N_TIMED_STATES = Option(
    "save_last_n_timed_states",
    2,
    count,
    "number of newest states of --save_state_every_n_minutes to keep",
    metavar="N",
)


@dataclass
class _Rolling(TrainingCallback):
    folder: Path
    name: str
    every: float
    """Seconds between states."""
    keep: int
    step: int = 0
    """Steps of this process; names a state if exact_resume is off, since steps before a resume are then unknown."""
    saved: list[Path] | None = None
    """Timed states of this run and of the runs that it resumed, oldest first."""
    last: float = field(default_factory=time.monotonic)

    def after_batch(self, accelerator: Accelerator) -> None:
        if not accelerator.sync_gradients:
            return
        self.step += 1
        # Clocks differ between processes, so any of them decides.
        if not ranks.largest(accelerator, time.monotonic() - self.last >= self.every):
            return
        if (current := resume.position()) is not None:
            current.gather()
        if accelerator.is_main_process or ranks.is_sharded(accelerator):
            self._save(accelerator)
        self.last = time.monotonic()

    def _save(self, accelerator: Accelerator) -> None:
        current = resume.position()
        step = current.step if current is not None else self.step
        state = rolling_state(self.folder, self.name, step)
        if self.saved is None:
            self.saved = self._earlier_states()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Do not wait on a full disk: training matters more than this state.
            with fail_fast(), current.preserving_random_state() if current is not None else contextlib.nullcontext():
                accelerator.save_state(str(state))
        except OSError as error:
            warn(f"{error}; training continues without this state")
            return
        if not accelerator.is_main_process:
            return
        self.saved = [*(path for path in self.saved if path != state), state]
        self._remove_oldest()
        note(f"state of step {step} saved: {state}")

    def _remove_oldest(self) -> None:
        """Remove all but the newest states. One that cannot be removed is tried again after the next state."""
        assert self.saved is not None
        kept, oldest = self.saved[-self.keep :], self.saved[: -self.keep]
        for old in [state for state in oldest if state.is_dir()]:
            try:
                remove_atomically(old)
            except OSError as error:  # on Windows a file in it may be open
                warn(f"cannot remove the older state {old}: {error.strerror or error}; training continues")
        self.saved = [*(state for state in oldest if state.is_dir()), *kept]

    def _earlier_states(self) -> list[Path]:
        """Return the timed states of the run that this process resumes, oldest first, and none of other runs."""
        run = run_record.current()
        rolling = [path for path in states(self.folder, self.name) if f"-{ROLLING}" in path.name]
        records = [
            (record.saved, path) for path in rolling if (record := run_record.read(path)) and run and record.id == run.id
        ]
        return [path for _, path in sorted(records)]


def _start(args: Namespace, accelerator: Accelerator, settings: Settings) -> _Rolling:
    minutes = settings[SAVE_STATE_EVERY_N_MINUTES] or 0.0
    return _Rolling(Path(args.output_dir or "."), output_name(args), minutes * 60, settings[SAVE_LAST_N_TIMED_STATES])


PATCH = Patch(
    name="rolling_states",
    summary="save a full state every --save_state_every_n_minutes and keep the newest --save_last_n_timed_states",
    targets=(),
    options=(SAVE_STATE_EVERY_N_MINUTES, SAVE_LAST_N_TIMED_STATES),
    exactness="exact",
    held_to="the same run without the patch",
    idea="https://github.com/kohya-ss/sd-scripts/issues/582",
    wanted=lambda settings: settings[SAVE_STATE_EVERY_N_MINUTES] is not None,
    stage=Stage.SAVE,
    on_start=_start,
    only_trains=True,
)
