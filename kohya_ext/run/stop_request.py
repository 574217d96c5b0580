"""Leave the training loop at the end of a step, with the model and the full state saved.

The saving is upstream's own: between the optimizer's step and the place where the script asks whether to save, the
arguments that it reads there are changed to "now, with the state". So the names, formats and metadata are the script's, in
every script that knows ``--save_every_n_steps``.
"""

from __future__ import annotations

import os
import signal
import threading
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.config.command_line import option_words, quoted, quoted_word, restart_line
from kohya_ext.config.settings import Settings, variables
from kohya_ext.console import note, note_at_once, warn
from kohya_ext.patching.training_loop import TrainingCallback, current
from kohya_ext.run import resume
from kohya_ext.run.atomic_write import final_of
from kohya_ext.run.output_files import DEFAULT_NAME

#: What the script reads after a step, and what it must say for model and state to be saved there and nothing removed.
_SAVE_NOW = {
    "save_every_n_steps": 1,
    "save_state": True,
    "save_last_n_steps": None,
    "save_last_n_steps_state": None,
}

#: The exit code of a run that was stopped by the stop file: the one that Ctrl-C has.
_BY_FILE = 128 + int(signal.SIGINT)


@dataclass
class Stopper(TrainingCallback):
    """Waits for a reason to stop and does it."""

    args: Namespace
    accelerator: Any
    file: Path
    """Stop when it exists."""
    parent: int
    """Stop when this process has another parent than this one; 0: whoever it is."""
    reason: str = ""
    """Why, in words; empty while there is none."""
    code: int = 0
    process: int = field(default_factory=os.getpid)
    stepping: bool = False
    """Whether a first step has begun: before that there is nothing to save."""
    states: list[Path] = field(default_factory=list)
    """The states that were saved in this process, in order."""
    _asked: dict[str, Any] | None = None
    """While the script is being asked to save, the arguments' own values."""
    _handlers: dict[int, Any] = field(default_factory=dict)
    """Signal -> its handler before this run."""

    def listen(self) -> None:
        """Handle SIGINT and SIGTERM; only the main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self.on_signal)

    def on_end(self) -> None:
        """Put the signals' handlers back."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._handlers = {}

    def request(self, reason: str, code: int) -> None:
        """Ask for the stop; the first reason counts."""
        if not self.reason:
            self.reason, self.code = reason, code

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT and SIGTERM. After the first SIGINT the next one kills at once, as if nobody handled it."""
        if os.getpid() != self.process:  # a data-loader worker that was forked: its parent tells it when to end
            return
        name, code = signal.Signals(number).name, 128 + number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not self.stepping:
            note_at_once(f"{name}: stopping before the first step, so there is nothing to save")
            # Recorded too: upstream's bare ``except:`` around git, say, catches SystemExit and goes on.
            self.request(name, code)
            raise SystemExit(code)
        if not self.reason:
            again = ". Ctrl-C again stops at once" if number == signal.SIGINT else ""
            note_at_once(f"{name}: finishing this step, then saving the model and the state{again}")
        self.request(name, code)

    def before_batch(self, accelerator: Any) -> None:
        """Leave when the last step was saved; also the place where the first step begins."""
        if self.reason and not self.stepping and accelerator.num_processes == 1:
            raise SystemExit(self.code)
        self.stepping = True
        if self._asked is None:
            return
        for name, value in self._asked.items():
            setattr(self.args, name, value)
        self._asked = None
        self._leave(accelerator)

    def after_batch(self, accelerator: Any) -> None:
        """Have the script save when there is a reason to stop; every process of the run decides alike."""
        if not accelerator.sync_gradients:
            return
        self._look_around()
        if not self._agreed(accelerator):
            return
        if (current := resume.position()) is not None:
            current.gather()
            if not current.state_is_due():
                current.hold()
        self._asked = {name: getattr(self.args, name) for name in _SAVE_NOW if hasattr(self.args, name)}
        for name in self._asked:
            setattr(self.args, name, _SAVE_NOW[name])

    def on_state_save(self, folder: Path) -> None:
        """Note where a state is saved."""
        self.states.append(final_of(folder))

    def _look_around(self) -> None:
        if self.reason:
            return
        if self.parent and os.getppid() != self.parent:
            note("the process that launched this one is gone: saving the model and the state")
            self.request("its launcher ended", 128 + signal.SIGTERM)
        elif self.file.exists():
            note(f"{self.file} is there: saving the model and the state")
            self.request(f"the stop file {self.file.name}", _BY_FILE)

    def _agreed(self, accelerator: Any) -> bool:
        if accelerator.num_processes == 1:
            return bool(self.reason)
        import torch

        mine = torch.tensor([self.code], device=accelerator.device)
        code = int(accelerator.gather(mine).max().item())
        if code:
            self.request("another process of this run was stopped", code)
        return bool(code)

    def _leave(self, accelerator: Any) -> None:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            self.file.unlink(missing_ok=True)
            state = self.states[-1] if self.states else None
            if state is None:
                warn("this script saved no state: what it saved after this step is all there is")
            else:
                beside = sorted(state.parent.glob(f"{state.name.removesuffix('-state')}*"))  # the model, its average, the state
                note(f"stopped ({self.reason}); saved {' and '.join(map(str, beside))}")
                note(f"to go on: {continuation(state, accelerator.num_processes)}")
        accelerator.end_training()
        raise SystemExit(self.code)


def continuation(state: Path, processes: int = 1) -> str:
    """Return what to type to go on from a saved state."""
    if processes == 1:
        return restart_line({"resume": str(state)})
    # What launched the processes is not on this one's command line.
    switches = [f"{name}={quoted_word(value)}" for name, value in sorted(os.environ.items()) if name in variables()]
    environment = f", with {' '.join(switches)} in the environment" if switches else ""
    return f"the same command with {quoted(option_words({'resume': state}))}{environment}"


def start(args: Namespace, accelerator: Any, settings: Settings, parent: int) -> Stopper:
    """Begin to wait for reasons to stop: signals (in the main thread only), the stop file, the launcher's end."""
    name = getattr(args, "output_name", None) or DEFAULT_NAME
    file = settings.stop_file or Path(getattr(args, "output_dir", None) or ".") / f"{name}.stop"
    waiting = Stopper(args, accelerator, file, parent)
    if accelerator.is_main_process and file.exists():
        file.unlink()
        note(f"removed {file}, which was there from before")
    waiting.listen()
    return waiting


def stopper() -> Stopper | None:
    """Return the stopper of this process's run; None where nothing waits for a reason to stop (safe_stop is off)."""
    return current(Stopper)
