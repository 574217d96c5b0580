"""Where a training run stands, kept in each of its states, and the way back there.

A state of accelerate's holds weights, optimizer, scheduler and random numbers, but neither how many steps were made nor
which batches of the epoch were seen; the scripts start to count at zero again. Added here: the steps, the pass over the
data, the batches of it, and the random state in which that pass began. To go on, the passes that were finished are left
out, the unfinished one is begun with its own random state and its batches are drawn (not trained) up to the place, and
the random state of the save is put back: the next batch, the next noise and the next file name are those of the run that
was not interrupted.

The batches drawn again cost their loading. Not restored: the random state of ``--persistent_data_loader_workers``, which
lives in the workers across epochs.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.console import note, stop, warn
from kohya_ext.output_names import states
from kohya_ext.safetensors_header import read_header

FILE = "kohya_ext_position.pt"
"""The file in a state's folder."""

AUTO = "auto"
"""What ``--resume`` says for the newest whole state of this output name."""

#: What the end of an epoch reads, and what it must say for an epoch that was left out to save and sample nothing.
_NOTHING_AT_EPOCH_END = {"save_every_n_epochs": None, "sample_every_n_epochs": None, "validate_every_n_epochs": sys.maxsize}


@dataclass(frozen=True)
class Place:
    """Where a run stood after one of its steps: everything that a state keeps beside weights and optimizer."""

    step: int
    epoch: int
    batch: int
    finished: bool
    began: dict[str, Any]
    random: dict[str, Any]


@dataclass
class Position:
    """Where the training loop of this process stands."""

    args: Namespace
    accelerator: Any
    step: int = 0
    """Optimizer steps made, those before a resume included."""
    epoch: int = -1
    """The pass over the data that is going on, from 0; -1 before the first."""
    batch: int = 0
    """Micro-batches of this pass that were trained."""
    finished: bool = False
    """Whether this pass came to its end."""
    _began: dict[str, Any] = field(default_factory=dict)
    """The random state and the data set's counters when this pass began."""
    _goal: dict[str, Any] | None = None
    """The position to go on from."""
    _random: dict[str, Any] = field(default_factory=dict)
    """The random state to go on with."""
    _hidden: dict[str, Any] = field(default_factory=dict)
    """While epochs are left out, the arguments' own values."""

    # --- saving ------------------------------------------------------------------------------------------------------

    def count(self, accelerator: Any) -> None:
        """Count a micro-batch, and the optimizer's step when it made one."""
        self.batch += 1
        self.step += bool(accelerator.sync_gradients)

    def place(self) -> Place:
        """Return where the run stands now."""
        return Place(self.step, self.epoch, self.batch, self.finished, self._began, random_state())

    def return_to(self, place: Place) -> None:
        """Stand where the run stood before, random numbers included, for a state that is saved later than its step."""
        self.step, self.epoch, self.batch, self.finished = place.step, place.epoch, place.batch, place.finished
        self._began = place.began
        set_random_state(place.random)

    def save(self, models: Any, weights: Any, folder: str) -> None:
        """Write the position into a state; a hook of ``accelerator.save_state``."""
        if self.accelerator.is_main_process:
            import torch

            stands = {"step": self.step, "epoch": self.epoch, "batch": self.batch, "finished": self.finished}
            accumulated = {"accumulated": getattr(self.args, "gradient_accumulation_steps", 1)}
            torch.save({**stands, **accumulated, **self._began}, os.path.join(folder, FILE))

    # --- going on ----------------------------------------------------------------------------------------------------

    def load(self, models: Any, folder: str) -> None:
        """Read the position of a state that is about to be loaded; a hook of ``accelerator.load_state``."""
        import torch

        file = Path(folder) / FILE
        if not file.is_file():
            warn(f"{folder} was saved without kohya_ext: sd-scripts counts steps and epochs from it in its own way")
            return
        if getattr(self.args, "initial_step", None) is not None or getattr(self.args, "initial_epoch", None) is not None:
            return  # the user says where to begin
        goal = torch.load(file, map_location="cpu", weights_only=True)
        if goal["step"] >= self.args.max_train_steps:
            stop(
                f"{folder} is at step {goal['step']} and --max_train_steps is {self.args.max_train_steps}: "
                "there is nothing left to train. Give more steps or leave out --resume"
            )
        # Smaller batches, more of them accumulated: as many pictures were seen.
        accumulated = getattr(self.args, "gradient_accumulation_steps", 1)
        goal["batch"] = goal["batch"] * accumulated // goal.get("accumulated", accumulated)
        self._goal = goal
        if hasattr(self.args, "initial_step"):
            self.args.initial_step = 0  # LoRA scripts would count on their own, from the state's train_state.json

    def loaded(self) -> None:
        """Take the random state that ``accelerator.load_state`` has just put in place."""
        if self._goal is not None:
            self._random = random_state()

    def draw(self, loader: Any, original: Callable[[Any], Iterator[Any]], frame: FrameType | None) -> Iterator[Any]:
        """Yield the batches of one pass over the training data; ``frame`` is the loop that takes them."""
        self.epoch += 1
        goal = self._goal
        if goal is not None and (self.epoch < goal["epoch"] or (self.epoch == goal["epoch"] and goal["finished"])):
            loader.iteration += 1
            self._hide()
            return
        if goal is None or self.epoch > goal["epoch"]:
            if goal is not None:
                self._arrive(goal, frame)
            self.batch, self.finished = 0, False
            self._began = {"random": random_state(), "counters": _counters(loader)}
            yield from original(loader)
        else:
            self._began = {"random": goal["random"], "counters": goal["counters"]}
            _set_counters(loader, goal["counters"])
            set_random_state(goal["random"])
            batches = original(loader)
            for _ in itertools.islice(batches, goal["batch"]):
                pass
            self.batch, self.finished = goal["batch"], False
            self._arrive(goal, frame)
            yield from batches
        self.finished = True

    def _arrive(self, goal: dict[str, Any], frame: FrameType | None) -> None:
        self._goal = None
        for name, value in self._hidden.items():
            setattr(self.args, name, value)
        self._hidden = {}
        vars(self.accelerator).pop("log", None)
        self.step = goal["step"]
        # What takes the batches may itself be wrapped.
        while frame is not None and not isinstance(frame.f_locals.get("global_step"), int):
            frame = frame.f_back
        if frame is None or not _set_local(frame, "global_step", self.step):
            stop("this script counts its steps in a way that is not known, so it cannot go on: --disable_patch honest_resume")
        if (bar := frame.f_locals.get("progress_bar")) is not None:
            bar.update(self.step)
        set_random_state(self._random)
        note(f"going on after step {self.step}, in epoch {self.epoch + 1} after {self.batch} batches")

    def _hide(self) -> None:
        if not self._hidden:
            self._hidden = {name: getattr(self.args, name) for name in _NOTHING_AT_EPOCH_END if hasattr(self.args, name)}
            for name in self._hidden:
                setattr(self.args, name, _NOTHING_AT_EPOCH_END[name])
            self.accelerator.log = lambda *args, **kwargs: None


def _counters(loader: Any) -> list[int]:
    """The data set's own epoch and step, by which it orders and captions: kept in this process without workers."""
    first = next(iter(getattr(loader.dataset, "datasets", [])), loader.dataset)
    return [getattr(first, "current_epoch", 0), getattr(first, "current_step", 0)]


def _set_counters(loader: Any, counters: list[int]) -> None:
    for name, value, now in zip(("set_current_epoch", "set_current_step"), counters, _counters(loader), strict=True):
        if value != now and hasattr(loader.dataset, name):
            getattr(loader.dataset, name)(value)


def _set_local(frame: FrameType, name: str, value: int) -> bool:
    """Set a local number of a running function, as a debugger does; return whether it now has it.

    The count of steps is a local variable of each script's ``train``, and nothing that the script calls can hand it over.
    """
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # since then f_locals writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return bool(frame.f_locals[name] == value)


# --- random numbers --------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """The random state of Python, numpy, torch and every CUDA device, of types that ``weights_only`` loads."""
    import numpy
    import torch

    state: Any = numpy.random.get_state(legacy=True)
    kind, keys, *rest = state
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Put a random state back. The CUDA devices' when there are as many as there were."""
    import numpy
    import torch

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


# --- finding states --------------------------------------------------------------------------------------------------


def newest_state(folder: Path, name: str | None) -> Path | None:
    """Return the newest whole state of an output name in a folder, by the time it was written; None when there is none."""
    for state in sorted(states(folder, name), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        problem = state_problem(state)
        if problem is None:
            return state
        warn(f"{state} is left out: {problem}")
    return None


def state_problem(state: Path) -> str | None:
    """Return why a state cannot be resumed from, or None when its files are whole."""
    needed = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    if missing := [name for name in needed if not (state / name).is_file()]:
        return f"it has no {' and no '.join(missing)}"
    for file in sorted(state.iterdir()):
        if file.suffix == ".safetensors":
            try:
                read_header(file)
            except ValueError as error:
                return str(error)
        elif file.suffix in (".bin", ".pkl", ".pt") and not zipfile.is_zipfile(file):
            return f"{file.name} is not whole"
    return None


_position: Position | None = None


def start(args: Namespace, accelerator: Any) -> Position:
    """Begin to keep the position of this process's run."""
    global _position
    _position = Position(args, accelerator)
    accelerator.register_save_state_pre_hook(_position.save)
    accelerator.register_load_state_pre_hook(_position.load)
    return _position


def position() -> Position | None:
    """Where this process's run stands, once its script has made its accelerator."""
    return _position
