"""Stop the training loop after a step, with the model and the full state saved.

The script saves with its own code. After the optimizer step and before the script decides whether to save, its save
arguments are changed to "save now, with the state". So names, formats and metadata are upstream's, in every script that has
``--save_every_n_steps``.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.config.command_line import restart_line
from kohya_ext.config.settings import Settings
from kohya_ext.console import note, note_at_once, warn
from kohya_ext.patching.step_save import SAVE_NOW
from kohya_ext.patching.training_loop import TrainingCallback, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.renames import unlink
from kohya_ext.run import console_events, journal, ranks, resume
from kohya_ext.run.atomic_write import final_path
from kohya_ext.run.last_step import last_step
from kohya_ext.run.output_files import output_name, rolling_state
from kohya_ext.run.state_size import state_bytes

#: Exit codes of a run that the user has stopped.
STOPPED = (129, 130, 143, 149)

#: The exit code of a run that was stopped by the stop file, the same as for Ctrl-C.
_STOP_FILE_CODE = 128 + int(signal.SIGINT)

#: The exit code of a run that Windows ends, the same as for SIGTERM.
_CLOSED_CODE = 128 + int(signal.SIGTERM)

#: Speed at which a state is assumed to be saved.
_BYTES_PER_SECOND = 4e8

#: Signals of a terminal: Ctrl-C, and on Windows Ctrl-Break. A second one ends the process immediately.
_KEYS = {signal.SIGINT: "Ctrl-C"}
if sys.platform == "win32":
    _KEYS[signal.SIGBREAK] = "Ctrl-Break"

#: Signals that end a run after its step, in addition to the keys. That of a closed terminal is left alone if nohup ignores it.
_ENDS: tuple[signal.Signals, ...] = (signal.SIGTERM,)
if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
    _ENDS += (signal.SIGHUP,)


@dataclass
class Stopper(TrainingCallback):
    """Stops the run after a step when that was requested."""

    args: Namespace
    accelerator: Accelerator
    file: Path
    """Stop when this file exists."""
    parent: int
    """Process ID of the launcher. Training stops when the parent process changes; 0 disables the check."""
    reason: str = ""
    """Reason for the stop, for messages; empty while none was requested."""
    code: int = 0
    """The exit code; 0 for a stop that completes the run."""
    process: int = field(default_factory=os.getpid)
    timed_states: bool = True
    """Whether the run saves its state every some minutes."""
    stepping: bool = False
    """Whether the first step has begun. Before that there is nothing to save."""
    left_out: str = ""
    """What a signal leaves out now, because all steps are trained and saved; empty if there is nothing."""
    saved: bool = False
    """Whether all steps are trained and the last model is saved."""
    states: list[Path] = field(default_factory=list)
    """The states that were saved in this process, in order."""
    states_before: int = 0
    """Number of states before the script was made to save."""
    _original: dict[str, Any] | None = None
    """The user's values of the save arguments, while they are changed to save now."""
    _handlers: dict[int, Any] = field(default_factory=dict)
    """Signal -> its handler before this run."""
    _ignore_closing: Callable[[], None] | None = None
    """Removes the handler of console events."""

    def install_handlers(self) -> None:
        """Install handlers for signals, and on Windows for console events; only possible in the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in (*_KEYS, *_ENDS):
                self._handlers[number] = signal.signal(number, self.on_signal)
            self._ignore_closing = console_events.handle(self.on_closing)

    def on_end(self) -> None:
        """Restore the signal handlers."""
        if self._ignore_closing is not None:
            self._ignore_closing()
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._handlers = {}

    def request(self, reason: str, code: int) -> None:
        """Request a stop. Only the first reason is kept."""
        if not self.reason:
            self.reason, self.code = reason, code
            if (watch := ranks.watch()) is not None:
                watch.stopping = True
            journal.event("stop", reason=reason, code=code)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A second Ctrl-C or Ctrl-Break kills the process immediately."""
        if os.getpid() != self.process:  # a forked data-loader worker, which its parent ends
            return
        if (watch := ranks.watch()) is not None and watch.failure is not None:  # the process is ending
            return
        name, code, keys = signal.Signals(number).name, 128 + number, _KEYS.get(signal.Signals(number))
        if keys is not None:
            signal.signal(number, signal.SIG_DFL)
        if self.left_out:
            note_at_once(f"{name}: the model is saved; leaving out {self.left_out}")
            raise SystemExit(0)
        if self.saved:
            note_at_once(f"{name}: everything is saved, and the run is ending")
            return
        if not self.stepping:
            note_at_once(f"{name}: stopping before the first step; nothing to save")
            # Record it too, because a bare ``except:`` in upstream (around git, for example) can swallow SystemExit.
            self.request(name, code)
            raise SystemExit(code)
        if not self.reason:
            again = f". {keys} again stops immediately" if keys is not None else ""
            task = "saving the last model" if self._is_trained() else "finishing this step, then saving the model and the state"
            note_at_once(f"{name}: {task}{again}")
        self.request(name, code)

    def _is_trained(self) -> bool:
        current = resume.position()
        return current is not None and current.step >= getattr(self.args, "max_train_steps", math.inf)

    def on_closing(self, event: str) -> None:
        """Save in this thread before Windows ends the process, in :data:`console_events.SECONDS`."""
        if not self.stepping or self.saved:
            return
        seconds = console_events.SECONDS
        until = time.monotonic() + seconds
        self.request(event, _CLOSED_CODE)
        last = last_step()
        newest = last.newest_state() if last is not None else None
        note_at_once(f"{event}: saving the state within {seconds:.0f} seconds; newest saved state: {newest or 'none'}")
        if last is not None:
            last.save_before_end(seconds, _CLOSED_CODE)
            if (state := last.newest_state()) is not None:
                note_at_once(f"to resume: {restart_line({'resume': str(state)})}")
        time.sleep(max(until - time.monotonic(), 0))  # the main thread ends the process before

    def before_batch(self, accelerator: Accelerator) -> None:
        """Exit once the last step was saved. Also marks the start of the first step."""
        if self.reason and not self.stepping and accelerator.num_processes == 1:
            raise SystemExit(self.code)
        self.stepping = True
        if self._original is None:
            return
        for name, value in self._original.items():
            setattr(self.args, name, value)
        self._original = None
        self._save_state(accelerator)
        self._exit(accelerator)

    def _save_state(self, accelerator: Accelerator) -> None:
        """Save the state in a script that saves none (LECO)."""
        current = resume.position()
        if self.states_before != len(self.states) or current is None or not accelerator.is_main_process:
            return
        with current.preserving_random_state():
            accelerator.save_state(str(rolling_state(Path(self.args.output_dir), self.args.output_name, current.step)))

    def after_batch(self, accelerator: Accelerator) -> None:
        """Make the script save if a stop was requested in any process of the run."""
        if not accelerator.sync_gradients:
            return
        if os.name == "nt" and not self.timed_states and accelerator.is_main_process:
            self.advise(accelerator)
        self._check_file_and_parent()
        if not self._is_requested(accelerator):
            return
        if (current := resume.position()) is not None:
            current.gather()
            if not current.state_is_due():
                current.fix_random_state()
        self.states_before = len(self.states)
        self._original = {name: getattr(self.args, name) for name in SAVE_NOW if hasattr(self.args, name)}
        for name in self._original:
            setattr(self.args, name, SAVE_NOW[name])

    def advise(self, accelerator: Accelerator) -> None:
        """Recommend timed states, once, if a closed window leaves too little time to save the state."""
        self.timed_states = True
        size, seconds = state_bytes(accelerator), console_events.SECONDS
        if size > seconds * _BYTES_PER_SECOND:
            note(
                f"closing the console window ends the run within {seconds:.0f} seconds, too few to save its state of "
                f"{size / 1e9:.1f} GB; use --save_state_every_n_minutes 10"
            )

    def after_training(self) -> None:
        """Stop nothing any more."""
        self.saved = True

    def on_state_save(self, folder: Path) -> None:
        """Record the path of a saved state."""
        self.states.append(final_path(folder))

    def _check_file_and_parent(self) -> None:
        if self.reason:
            return
        if self.parent and not _runs_below(self.parent):
            note("the launcher has ended: saving the model and the state")
            self.request("its launcher ended", 128 + signal.SIGTERM)
        elif os.path.exists(self.file):  # False, too, for a folder that cannot be read any more
            note(f"stop file {self.file} exists: saving the model and the state")
            self.request(f"stop file {self.file.name}", _STOP_FILE_CODE)

    def _is_requested(self, accelerator: Accelerator) -> bool:
        requested = ranks.largest(accelerator, self.code + 1 if self.reason else 0)  # a planned stop has code 0
        if requested:
            self.request("another process of this run was stopped", requested - 1)
        return bool(requested)

    def _exit(self, accelerator: Accelerator) -> None:
        accelerator.wait_for_everyone()
        ranks.leave()
        if accelerator.is_main_process:
            _remove(self.file)
            state = self.states[-1] if self.states else None
            if state is None:
                warn("the script saved no state, so this run cannot be resumed")
            else:
                saved = sorted(state.parent.glob(f"{state.name.removesuffix('-state')}*"))  # model, EMA weights, state
                note(f"stopped ({self.reason}); saved {' and '.join(map(str, saved))}")
                if self.code:
                    note(f"to resume: {restart_line({'resume': str(state)})}")
        accelerator.end_training()
        raise SystemExit(self.code)


def start(args: Namespace, accelerator: Accelerator, settings: Settings, parent: int) -> Stopper:
    """Start to watch for signals (in the main thread only), the stop file and the end of the launcher."""
    file = settings["stop_file"] or Path(getattr(args, "output_dir", None) or ".") / f"{output_name(args)}.stop"
    timed_states = settings["save_state_every_n_minutes"] is not None
    stopper = Stopper(args, accelerator, file, parent, timed_states=timed_states)
    if accelerator.is_main_process and file.exists():
        _remove(file)
        note(f"removed {file}, left over from an earlier run")
    stopper.install_handlers()
    return stopper


def leave_to_parent() -> None:
    """Ignore the keys of a terminal in a data-loader worker: its parent needs it for the step that it finishes, and ends it.

    A forked worker has its parent's handlers, see :meth:`Stopper.on_signal`; on Windows each worker is a new process.
    """
    for number in _KEYS:
        signal.signal(number, signal.SIG_IGN)


def _runs_below(parent: int) -> bool:
    """Return whether the process that started this one still runs."""
    if os.name == "posix":
        return os.getppid() == parent
    import psutil  # Windows keeps the ID of a parent that has ended

    return bool(psutil.pid_exists(parent))


def _remove(file: Path) -> None:
    try:
        unlink(file)
    except OSError as error:
        warn(f"cannot remove the stop file {file}: {error.strerror or error}; remove it before the next run")


def stopper() -> Stopper | None:
    """Return the stopper of this process's run; None when no patch installed one."""
    return current(Stopper)
