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

import contextlib
import ctypes
import itertools
import random
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.console import note, stop, warn
from kohya_ext.errors import UserError
from kohya_ext.patching.training_loop import TrainingCallback, current
from kohya_ext.run import run_record
from kohya_ext.run.atomic_write import final_of
from kohya_ext.run.output_files import states
from kohya_ext.run.run_record import RunRecord
from kohya_ext.run.safetensors_header import read_header

FILE = "kohya_ext_position.pt"
"""The file in a state's folder."""

RANDOM_FILE = "kohya_ext_random.pt"
"""The random state with which the run went on after it had saved a state, in the state's folder."""

_SMALL = 16_000_000
"""Bytes of a file that is small enough to be read to its end before a run."""

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
class Position(TrainingCallback):
    """Where the training loop of this process stands."""

    args: Namespace
    accelerator: Any
    way_out: str = ""
    """What to do where a script's training loop is not known."""
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
    _ranks: list[dict[str, Any]] | None = None
    """With several processes, the random state of each after this step: see :meth:`gather`."""
    _held: dict[str, Any] | None = None
    """The random state for states that an uninterrupted run would not have saved: see :meth:`hold`."""
    _unsettled: list[Path] = field(default_factory=list)
    """States that were saved since the loop last took a batch: see :meth:`_settle`."""
    _goal: dict[str, Any] | None = None
    """The position to go on from."""
    _random: dict[str, Any] = field(default_factory=dict)
    """The random state to go on with."""
    _hidden: dict[str, Any] = field(default_factory=dict)
    """While epochs are left out, the arguments' own values."""

    # --- saving ------------------------------------------------------------------------------------------------------

    def after_batch(self, accelerator: Any) -> None:
        """Count a micro-batch, and the optimizer's step when it made one."""
        self.batch += 1
        self.step += bool(accelerator.sync_gradients)
        if accelerator.num_processes > 1 and accelerator.sync_gradients:
            self._ranks = None
            if self.state_is_due(accelerator.gradient_state.end_of_dataloader):
                self.gather()

    def state_is_due(self, epoch_ends: bool = False) -> bool:
        """Return whether the script itself will save a state after this step, or may do so because the epoch ends."""
        if not (getattr(self.args, "save_state", False) or getattr(self.args, "save_state_on_train_end", False)):
            return False
        every = getattr(self.args, "save_every_n_steps", None)
        return bool(epoch_ends or (every and self.step % every == 0))

    def gather(self) -> None:
        """Collect every process's random state; all of them must call it. Only the first process saves states."""
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            self._ranks = gather_object([{"random": random_state(), "began": self._began}])

    def hold(self) -> None:
        """Save the random state of this moment in every state from now on.

        For states that the uninterrupted run does not save: rich 14.1, which sd-scripts pins, draws a random number for each
        line that it logs, so saving a state changes how captions are shuffled afterwards.
        """
        self._held = random_state()

    @contextlib.contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Save a state within it, and the run goes on as if it had not been saved."""
        self.hold()
        before = random.getstate()
        try:
            yield
        finally:
            random.setstate(before)
            self._held = None

    def place(self) -> Place:
        """Return where the run stands now."""
        return Place(self.step, self.epoch, self.batch, self.finished, self._began, random_state())

    def return_to(self, place: Place) -> None:
        """Stand where the run stood before, random numbers included, for a state that is saved later than its step."""
        self.step, self.epoch, self.batch, self.finished = place.step, place.epoch, place.batch, place.finished
        self._began = place.began
        set_random_state(place.random)

    def on_state_save(self, folder: Path) -> None:
        """Write the position into a state."""
        if self.accelerator.is_main_process:
            import torch

            stands = {"step": self.step, "epoch": self.epoch, "batch": self.batch, "finished": self.finished}
            accumulated = {"accumulated": getattr(self.args, "gradient_accumulation_steps", 1)}
            ranks = self._ranks or [{"random": self._held or random_state(), "began": self._began}]
            processes = {"processes": self.accelerator.num_processes, "ranks": ranks}
            torch.save({**stands, **accumulated, **processes}, folder / FILE)
            if self._held is None and self.accelerator.num_processes == 1:
                self._unsettled.append(final_of(folder))

    def _settle(self) -> None:
        """Keep the random state with which the run goes on in the states that it has just saved."""
        import torch

        for state in self._unsettled:
            if state.is_dir():  # it may be gone already: only the newest few are kept
                with contextlib.suppress(OSError):  # a full disk: the state has the random state of its save
                    torch.save(random_state(), state / RANDOM_FILE)
        self._unsettled.clear()

    # --- going on ----------------------------------------------------------------------------------------------------

    def on_state_load(self, folder: Path) -> None:
        """Read the position of a state that is about to be loaded."""
        import torch

        file = folder / FILE
        if not file.is_file():
            warn(f"{folder} was saved without kohya_ext: sd-scripts counts steps and epochs from it in its own way")
            return
        if getattr(self.args, "initial_step", None) is not None or getattr(self.args, "initial_epoch", None) is not None:
            return  # the user says where to begin
        goal = torch.load(file, map_location="cpu", weights_only=True)
        if "ranks" not in goal:
            stop(
                f"{folder} was saved by an earlier version of kohya_ext, from whose states this one cannot resume: "
                "finish the run with that version"
            )
        if goal["step"] >= self.args.max_train_steps:
            stop(
                f"{folder} is at step {goal['step']} and --max_train_steps is {self.args.max_train_steps}: "
                "there is nothing left to train. Give more steps or leave out --resume"
            )
        # Smaller batches, more of them accumulated: as many images were seen.
        accumulated = getattr(self.args, "gradient_accumulation_steps", 1)
        goal["batch"] = goal["batch"] * accumulated // goal["accumulated"]
        mine = self._mine(goal, folder)
        goal.update(mine["began"])
        settled = folder / RANDOM_FILE
        self._random = torch.load(settled, weights_only=True) if settled.is_file() else mine["random"]
        self._goal = goal
        if hasattr(self.args, "initial_step"):
            self.args.initial_step = 0  # LoRA scripts would count on their own, from the state's train_state.json

    def _mine(self, goal: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return this process's part of a saved position; the first process's where it has none."""
        ranks: list[dict[str, Any]] = goal["ranks"]
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        if not len(ranks) == goal["processes"] == processes and index == 0:
            warn(
                f"{folder} holds the random state of {len(ranks)} of {goal['processes']} processes, and this run has "
                f"{processes}: the result will differ from the uninterrupted run's"
            )
        return ranks[index if index < len(ranks) else 0]

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Yield the batches of one pass over the training data, from the place on where a resumed run goes on."""
        self._settle()
        self.epoch += 1
        goal = self._goal
        if goal is not None and (self.epoch < goal["epoch"] or (self.epoch == goal["epoch"] and goal["finished"])):
            loader.iteration += 1
            self._hide()
            return
        if goal is None or self.epoch > goal["epoch"]:
            if goal is not None:
                self._arrive(goal, loop)
            self.batch, self.finished = 0, False
            self._began = {"random": random_state(), **_data_state(loader)}
            yield from self._settling(batches())
        else:
            self._began = {name: goal[name] for name in ("random", "counters", "seeds", "generator")}
            _set_data_state(loader, goal)
            set_random_state(goal["random"])
            drawn = batches()
            for _ in itertools.islice(drawn, goal["batch"]):
                pass
            self.batch, self.finished = goal["batch"], False
            self._arrive(goal, loop)
            yield from self._settling(drawn)
        self.finished = True

    def _settling(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            if self._unsettled:  # the loop is done with this step, whatever it saved, sampled and logged
                self._settle()

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
            stop(f"this script counts its steps in a way that is not known, so it cannot go on: {self.way_out}")
        if (bar := frame.f_locals.get("progress_bar")) is not None:
            _begin_at(bar, self.step)
        set_random_state(self._random)
        note(f"going on after step {self.step}, in epoch {self.epoch + 1} after {self.batch} batches")

    def _hide(self) -> None:
        if not self._hidden:
            self._hidden = {name: getattr(self.args, name) for name in _NOTHING_AT_EPOCH_END if hasattr(self.args, name)}
            for name in self._hidden:
                setattr(self.args, name, _NOTHING_AT_EPOCH_END[name])
            self.accelerator.log = lambda *args, **kwargs: None


def _begin_at(bar: Any, step: int) -> None:
    """Have a tqdm bar begin at a step, so that its rate and the time left are those of the steps to come."""
    bar.initial = bar.n = bar.last_print_n = step
    bar.start_t = bar.last_print_t = time.time()
    bar.refresh()


def _data_sets(loader: Any) -> list[Any]:
    return list(getattr(loader.dataset, "datasets", [loader.dataset]))


def _data_state(loader: Any) -> dict[str, Any]:
    """Return what decides the order of a pass: the data sets' epoch, step and seeds, and the sampler's own generator.

    Epoch and step are kept in this process without data-loader workers; a generator exists with several processes.
    """
    sets = _data_sets(loader)
    generator = getattr(loader, "synchronized_generator", None)
    return {
        "counters": [getattr(sets[0], "current_epoch", 0), getattr(sets[0], "current_step", 0)] if sets else [0, 0],
        "seeds": [getattr(one, "seed", None) for one in sets],
        "generator": generator.get_state() if generator is not None else None,
    }


def _set_data_state(loader: Any, state: Mapping[str, Any]) -> None:
    sets, now = _data_sets(loader), _data_state(loader)
    if len(state["seeds"]) == len(sets):
        for one, seed in zip(sets, state["seeds"], strict=True):
            if seed is not None and hasattr(one, "set_seed"):
                one.set_seed(seed)
    for name, value, old in zip(("set_current_epoch", "set_current_step"), state["counters"], now["counters"], strict=True):
        if value != old and hasattr(loader.dataset, name):
            getattr(loader.dataset, name)(value)
    if state["generator"] is not None and now["generator"] is not None:
        loader.synchronized_generator.set_state(state["generator"])


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
    """Put a random state back. On other GPUs than it was saved on, the result will differ, which is logged."""
    import numpy
    import torch

    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    elif state["cuda"] or torch.cuda.is_available():
        warn(
            f"the state was saved with {len(state['cuda'])} GPUs and there are {torch.cuda.device_count()}: "
            "the result will differ from the uninterrupted run's"
        )


# --- finding states --------------------------------------------------------------------------------------------------


def newest_state(folder: Path, name: str | None) -> Path | None:
    """Return the newest whole state of an output name in a folder, of this process's run where that is known, or None."""
    running = run_record.current()
    for state in _newest_first(folder, name):
        record = run_record.read(state)
        if running is not None and record is not None and record.id != running.id:
            continue
        problem = state_problem(state)
        if problem is None:
            return state
        warn(f"{state} is left out: {problem}")
    return None


def state_to_resume(folder: Path, name: str | None, run: RunRecord, inexact: bool = False) -> Path | None:
    """Return the state that ``--resume auto`` means: the newest whole one that ``run`` continues; None when there is none.

    A state without a record, which upstream saved, counts as the run's. Raises UserError when there are states of this run
    and none can be resumed: starting over in silence would cost what they hold.
    """
    broken: list[str] = []
    for state in _newest_first(folder, name):
        record = run_record.read(state)
        if record is not None and (differences := run.differences(record)):
            note(
                f"--resume auto: {state.name} was saved by another run ({', '.join(differences)}); "
                f"to resume it anyway: --resume {state}"
            )
        elif (problem := state_problem(state, inexact)) is not None:
            broken.append(f"{state.name}: {problem}")
        else:
            for line in broken:
                warn(f"--resume auto: {line}; resuming from an older state")
            return state
    if broken:
        raise UserError(
            f"--resume auto: no state in {folder} can be resumed ({'; '.join(broken)}). Restore one from a backup, or leave "
            "out --resume to start from the beginning: the states are then kept aside as NAME.previous"
        )
    return None


def _newest_first(folder: Path, name: str | None) -> list[Path]:
    def saved(state: Path) -> float:
        record = run_record.read(state)
        return record.saved if record is not None else state.stat().st_mtime

    return sorted(states(folder, name), key=saved, reverse=True)


def leftovers(folder: Path, name: str | None, run: RunRecord, resumed: Path | None) -> list[Path]:
    """Return the states of this output name that are not part of ``run``: an earlier run's, or of steps that it goes back on.

    ``resumed`` is the state that it goes on from. States of unknown origin are leftovers only of a run that starts anew.
    """
    there = _newest_first(folder, name)
    if resumed is None:
        return there
    origin = run_record.read(resumed)
    found = []
    for state in there:
        record = run_record.read(state)
        if origin is None or record is None or state.resolve() == resumed.resolve():
            continue
        if record.id != run.id or record.step > origin.step:
            found.append(state)
    return found


def state_problem(state: Path, inexact: bool = False) -> str | None:
    """Return why a state cannot be resumed from, or None when its files are whole.

    ``inexact``: a random state that is missing or damaged is no problem.
    """
    record = run_record.read(state)
    if record is not None:
        sizes = {name: (state / name).stat().st_size for name in record.files if (state / name).is_file()}
        for name, size in record.files.items():
            if inexact and name.startswith("random_states_"):
                continue
            if name not in sizes:
                return f"it has no {name}"
            if sizes[name] != size:
                return f"{name} has {sizes[name]} of {size} bytes"
    elif problem := _missing(state, inexact):
        return problem
    for file in sorted(state.iterdir()):
        if inexact and file.name.startswith("random_states_"):
            continue
        if file.suffix == ".safetensors":
            try:
                read_header(file)
            except ValueError as error:
                return str(error)
        elif file.suffix in (".bin", ".pkl", ".pt") and not _is_whole_zip(file):
            return f"{file.name} is damaged"
    return None


def _missing(state: Path, inexact: bool) -> str | None:
    """Return what accelerate writes and a state lacks. DeepSpeed has files of its own for weights and optimizer."""
    names = [path.name for path in state.iterdir()]
    needed = ["scheduler.bin", *([] if inexact else ["random_states_0.pkl"])]
    if not any(path.is_dir() for path in state.iterdir()):
        needed.append("optimizer.bin")
    missing = [name for name in needed if name not in names]
    if not any(name.startswith(("model", "pytorch_model")) for name in names):
        missing.append("model.safetensors")
    return f"it has no {' and no '.join(missing)}" if missing else None


def _is_whole_zip(file: Path) -> bool:
    """Return whether a file of torch.save's is whole; the contents of large ones are not read."""
    try:
        with zipfile.ZipFile(file) as archive:
            return file.stat().st_size > _SMALL or archive.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def random_state_problem(folder: Path, process: int) -> str | None:
    """Return why a state's random numbers cannot be restored, or None. accelerate only logs it, and trains on."""
    if (folder / FILE).is_file():
        return None  # it has its own
    from accelerate.utils import load

    file = folder / f"random_states_{process}.pkl"
    try:
        missing = {"random_state", "numpy_random_seed", "torch_manual_seed"} - load(str(file)).keys()
    except Exception as error:  # whatever a damaged pickle raises
        return f"{file.name} cannot be read ({type(error).__name__}: {error})"
    return f"{file.name} has no {', '.join(sorted(missing))}" if missing else None


def position() -> Position | None:
    """Return where this process's run stands; None where nothing keeps it."""
    return current(Position)
