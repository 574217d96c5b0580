"""Save a run's position in its states, and resume from there.

accelerate's states hold weights, optimizer, scheduler and random state. They hold neither the step count nor the batches
that the epoch has used, so the scripts count from zero again. This module adds the step, the epoch, the batch, and the
random state at the start of the epoch.

A resumed run skips finished epochs. It starts the unfinished epoch with that epoch's random state, draws its batches without
training up to the saved position, and restores the random state of the save. The next batch, noise and file name are then
those of an uninterrupted run.

Skipped batches are still loaded. accelerate loads a batch before it is needed. Without data loader workers it uses random
numbers of this process, of which saving a state may draw some (:mod:`kohya_ext.run.log_links`), so a state also holds the
random state from before that batch. With ``--persistent_data_loader_workers`` the workers live across epochs. Each seeds its
random numbers again after its first batch of an epoch, so the epoch before the position is also drawn without training.

A state of the last step trains nothing: the script writes its final model. LECO scripts have no data loader and load no
state; see :meth:`Position.resume_without_loader`.
"""

from __future__ import annotations

import _codecs
import contextlib
import ctypes
import itertools
import random
import shutil
import sys
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_ext.console import note, stop, warn
from kohya_ext.errors import UserError
from kohya_ext.patching.training_loop import TrainingCallback, begin_without_batches, current
from kohya_ext.patching.types import Accelerator
from kohya_ext.renames import is_open, patiently
from kohya_ext.run import data_order, journal, log_links, run_record
from kohya_ext.run.atomic_write import final_path
from kohya_ext.run.loaded_parts import LoadedParts, gradient_differences, network_norms, save_gradients
from kohya_ext.run.output_files import final_models, states
from kohya_ext.run.run_record import RunRecord
from kohya_ext.run.safetensors_header import read_header

FILE = "kohya_ext_position.pt"
"""The file in a state's folder."""

RANDOM_FILE = "kohya_ext_random_states.pt"
"""The random state after the step that saved a state, in the state's folder."""

_CHECKSUM_LIMIT = 16_000_000
"""Largest file, in bytes, whose checksums are verified before a run."""

AUTO = "auto"
"""The value of ``--resume`` for the newest complete state of this output name."""

#: What a state holds of the start of its epoch.
_BEGAN = ("random", "counters", "next_step", "seeds", "generator")

#: Arguments that the scripts read at the end of an epoch -> values with which a skipped epoch saves and samples nothing.
_SKIPPED_EPOCH = {"save_every_n_epochs": None, "sample_every_n_epochs": None, "validate_every_n_epochs": sys.maxsize}


@dataclass(frozen=True)
class Snapshot:
    """The position and random state after a step. A saved state also contains weights and optimizer."""

    step: int
    epoch: int
    batch: int
    finished: bool
    began: dict[str, Any]
    earlier: dict[str, Any] | None
    loaded: dict[str, Any] | None
    order: dict[str, Any]
    random: dict[str, Any]

    def part(self) -> dict[str, Any]:
        """Return this process's part of a saved position."""
        names = ("random", "began", "earlier", "loaded", "order")
        return {name: getattr(self, name) for name in names}


@dataclass
class Position(TrainingCallback):
    """The position of this process's training loop."""

    args: Namespace
    accelerator: Accelerator
    way_out: str = ""
    """Advice for scripts whose training loop is unknown."""
    step: int = 0
    """Optimizer steps, including those before a resume."""
    epoch: int = -1
    """The current epoch, from 0; -1 before the first."""
    batch: int = 0
    """Micro-batches of this epoch that were trained."""
    finished: bool = False
    """Whether all batches of this epoch were trained."""
    _began: dict[str, Any] = field(default_factory=dict)
    """The random state and the order of the data at the start of this epoch."""
    _earlier: dict[str, Any] | None = None
    """The same of the epoch before, if the workers live across epochs."""
    _loaded: dict[str, Any] | None = None
    """The host's random state and the datasets' step before the newest batch was loaded; None with workers."""
    _loader: Any = None
    """The training data's loader; None before the first epoch."""
    _order: dict[str, Any] | None = None
    """The order of the data after an earlier step, to save a state of that step: see :meth:`restore`."""
    _ranks: list[dict[str, Any]] | None = None
    """With several processes, the random state of each after this step: see :meth:`gather`."""
    _fixed: dict[str, Any] | None = None
    """The random state for states that an uninterrupted run would not save: see :meth:`fix_random_state`."""
    _has_left_step: bool = False
    """Whether the loop has finished the statements after the last step: saving, sampling and logging."""
    _new_states: list[Path] = field(default_factory=list)
    """States saved since the loop last took a batch: see :meth:`_save_next_random_state`."""
    _is_within_step: bool = False
    """Whether gradients of the next step are computed."""
    _is_due: bool = False
    """Whether the script saves a state after this step, in a run with several processes."""
    _target: dict[str, Any] | None = None
    """The position to resume from."""
    _random: dict[str, Any] = field(default_factory=dict)
    """The random state to resume with."""
    _original: dict[str, Any] = field(default_factory=dict)
    """The user's values of arguments that are overridden while epochs are skipped."""
    _loaded_parts: LoadedParts | None = None
    """What the script may lose of the loaded state before its first step."""

    # --- saving ------------------------------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Note that gradients are added to those of earlier steps which no optimizer clears."""
        self._is_within_step = True

    def after_batch(self, accelerator: Accelerator) -> None:
        """Count a micro-batch, and the optimizer step if there was one."""
        self._is_within_step = not accelerator.sync_gradients
        self.batch += 1
        self._order, self._has_left_step = None, False
        self.step += bool(accelerator.sync_gradients)
        if accelerator.num_processes > 1 and accelerator.sync_gradients:
            self._ranks = None
            self._is_due = self.state_is_due(accelerator.gradient_state.end_of_dataloader)
            if self._is_due:
                self.gather()

    def state_is_due(self, epoch_ends: bool = False) -> bool:
        """Return whether the script itself saves a state after this step, or may do so because the epoch ends."""
        if not (getattr(self.args, "save_state", False) or getattr(self.args, "save_state_on_train_end", False)):
            return False
        every = getattr(self.args, "save_every_n_steps", None)
        is_last = self.step >= self.args.max_train_steps
        return bool(epoch_ends or is_last or (every and self.step % every == 0))

    def gather(self) -> None:
        """Collect the random state of every process, because only the first one saves states. All must call this."""
        if self.accelerator.num_processes > 1:
            from accelerate.utils import gather_object

            self._ranks = gather_object([self.snapshot().part()])

    def fix_random_state(self, state: dict[str, Any] | None = None) -> None:
        """Write the given random state, or else the current one, into every state from now on.

        Call it for states that an uninterrupted run does not save. rich 14.1, which sd-scripts pins, draws random numbers for
        logged lines, so saving a state changes how captions are shuffled afterwards.
        """
        self._fixed = state or random_state()

    @contextlib.contextmanager
    def preserving_random_state(self) -> Iterator[None]:
        """Save a state inside this block without affecting the rest of the run."""
        self.fix_random_state()
        before, links = random.getstate(), log_links.remembered()
        try:
            yield
        finally:
            log_links.remember(links)
            random.setstate(before)
            self._fixed = None

    def snapshot(self) -> Snapshot:
        """Return the current position and random state."""
        order = self._order or (data_order.state(self._loader) if self._loader is not None else {})
        began = (self._began, self._earlier, self._loaded)
        return Snapshot(self.step, self.epoch, self.batch, self.finished, *began, order, random_state())

    def restore(self, snapshot: Snapshot, ranks: list[dict[str, Any]] | None = None) -> None:
        """Restore an earlier position and random state, to save a state of that step later.

        ``ranks``: the parts of all processes of a run with several.
        """
        self._ranks = ranks
        self.step, self.epoch, self.batch = snapshot.step, snapshot.epoch, snapshot.batch
        self.finished, self._began, self._loaded = snapshot.finished, snapshot.began, snapshot.loaded
        self._earlier, self._order = snapshot.earlier, snapshot.order
        set_random_state(snapshot.random)

    def on_state_save(self, folder: Path) -> None:
        """Write the position into a state."""
        if self.accelerator.is_main_process and self._target is not None:
            # No epoch was left, so the script writes what it has loaded.
            shutil.copyfile(Path(self.args.resume) / FILE, folder / FILE)
        elif self.accelerator.is_main_process:
            import torch

            counters = {"step": self.step, "epoch": self.epoch, "batch": self.batch, "finished": self.finished}
            images = {"batch_sizes": data_order.batch_sizes(self._loader) if self._loader is not None else []}
            own = self.snapshot().part()
            ranks = self._ranks or [{**own, "random": self._fixed or own["random"]}]
            processes = {"processes": self.accelerator.num_processes, "ranks": ranks}
            norms = {"norms": network_norms(self.accelerator), "left": self._has_left_step}
            gradients = {"gradients": save_gradients(self.accelerator, folder), "within_step": self._is_within_step}
            torch.save({**counters, "start": _start(self.args), **images, **processes, **norms, **gradients}, folder / FILE)
            if self._fixed is None:
                self._new_states.append(final_path(folder))

    def _save_next_random_state(self) -> None:
        """Add the current random states, with which the next step begins, to the states that were just saved.

        With several processes all call this, because only the first one saves.
        """
        import torch

        states = [random_state()] if self._new_states else []
        if self._is_due:
            from accelerate.utils import gather_object

            states = gather_object([random_state()])
        for state in self._new_states:
            if state.is_dir():  # only the newest few states are kept, so it may already be removed
                with contextlib.suppress(OSError):  # full disk: the state still has the random state of its save
                    torch.save(states, state / RANDOM_FILE)
        self._new_states.clear()
        self._is_due = False

    # --- resuming ----------------------------------------------------------------------------------------------------

    def on_state_load(self, folder: Path) -> None:
        """Read the position from a state that is about to be loaded."""
        import torch

        file = folder / FILE
        if not file.is_file():
            warn(f"{folder} was saved without kohya_ext: the step and epoch counts are upstream's and may be wrong")
            return
        target = torch.load(file, map_location="cpu", weights_only=True)
        given, start = _start(self.args), target.get("start", [None, None])
        # Skipped batches come from another loader, so the position in their epoch is not known.
        if any(given) and (given != start or getattr(self.args, "skip_until_initial_step", False)):
            warn(
                f"the position in {folder} is not used, because --initial_step or --initial_epoch sets the start: the result "
                f"will differ from an uninterrupted run. Without these options it continues after step {target['step']}"
            )
            return
        if "ranks" not in target:
            stop(f"cannot resume: {folder} was saved by an earlier version of kohya_ext; finish the run with that version")
        if target["step"] > self.args.max_train_steps:
            stop(
                f"nothing left to train: {folder} is at step {target['step']} and --max_train_steps is "
                f"{self.args.max_train_steps}; increase it or remove --resume"
            )
        rank = self._rank_state(target, folder)
        target.update({"next_step": None, **rank["began"]}, **{name: rank.get(name) for name in ("earlier", "loaded", "order")})
        next_random, index = folder / RANDOM_FILE, self.accelerator.process_index
        states = torch.load(next_random, weights_only=True) if next_random.is_file() else []
        self._random = states[index] if index < len(states) else rank["random"]
        self._target, self.step = target, target["step"]
        if hasattr(self.args, "initial_step"):
            # Epochs count from the run's start. Without any, LoRA scripts would count from the state's train_state.json.
            self.args.initial_step, self.args.initial_epoch = start if any(start) else (0, None)
        if getattr(self.args, "sample_at_first", False):
            self.args.sample_at_first = False  # the run has these samples; they would replace those of step 0

    def _rank_state(self, target: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Return this process's part of a saved position, or else the first process's."""
        ranks: list[dict[str, Any]] = target["ranks"]
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        if not len(ranks) == target["processes"] == processes and index == 0:
            warn(
                f"{folder} holds the random state of {len(ranks)} of {target['processes']} processes, but this run has "
                f"{processes}: the result will differ from an uninterrupted run"
            )
        return ranks[index if index < len(ranks) else 0]

    def keep_loaded(self, folder: Path) -> None:
        """Keep what the script may lose of a state that accelerate has just loaded."""
        # accelerate's count of micro-batches, which in a state saved after a failure includes those of the failed step.
        self.accelerator.step = 0
        norms = self._target.get("norms", {}) if self._target is not None else {}
        self._loaded_parts = LoadedParts.of(self.accelerator, folder, norms, self._target is not None)

    def add_late(self, kind: str, index: int, prepared: Any) -> None:
        """Load the state of an optimizer or scheduler that the script has prepared after loading the state."""
        if self._loaded_parts is not None:
            self._loaded_parts.load_late(kind, index, prepared)

    def resume_without_loader(self) -> None:
        """Load the state in a script that loads none and has no data loader, before its loop begins."""
        if self._loader is not None or self.accelerator._dataloaders or not getattr(self.args, "resume", None):
            return
        self.accelerator.load_state(self.args.resume)
        if self._target is not None and self._is_last(self._target):
            self.step, self.args.max_train_steps = self._target["step"], 0  # its loop runs while steps are missing
            note(f"all {self.step} steps are trained; writing the final model")
            begin_without_batches()

    def before_batch(self, accelerator: Accelerator) -> None:
        """Without a data loader, save the random state of the last state, and set the position of a resumed run."""
        if self._loader is None:
            self._save_next_random_state()
            if self._target is not None:
                self._finish_resume(self._target, sys._getframe())

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Yield the batches of one epoch; in a resumed run, only those after the saved position."""
        self._save_next_random_state()
        self.epoch += 1
        self._loader = loader
        target = self._target
        if target is not None and self._is_skipped(target):
            self._skip_epoch(loader, batches, target)
            if self.epoch == target["epoch"] and self._is_last(target):
                note(f"all {target['step']} steps are trained; writing the final model")
                self._finish_resume(target, loop)
                begin_without_batches()
            return
        if target is None or self.epoch > target["epoch"]:
            if target is not None:
                data_order.restore(loader, {**target, **(target["order"] or {})})
                self._finish_resume(target, loop)
            self.batch, self.finished = 0, False
            self._begin({"random": random_state(), **data_order.state(loader)})
            with self._watched(loader):
                yield from self._after_each(batches())
        else:
            self._begin_again(target)
            target["batch"] = data_order.batches_of_as_many_images(loader, target["batch"], target.get("batch_sizes", []))
            with self._watched(loader, target["batch"], target["loaded"]):
                drawn = batches()
                for _ in itertools.islice(drawn, target["batch"]):
                    pass
                self.batch, self.finished = target["batch"], False
                data_order.set_next_step(loader, (target["order"] or {}).get("next_step"))
                self._finish_resume(target, loop)
                yield from self._after_each(drawn)
        self.finished = True

    def _begin(self, began: dict[str, Any]) -> None:
        self._earlier = self._began if _is_persistent(self._loader) and self._began else None
        self._began = began

    def _begin_again(self, began: Mapping[str, Any]) -> None:
        self._begin({name: began[name] for name in _BEGAN})
        data_order.restore(self._loader, began)
        set_random_state(began["random"])

    def _is_last(self, target: Mapping[str, Any]) -> bool:
        return bool(target["step"] >= self.args.max_train_steps)

    def _is_skipped(self, target: Mapping[str, Any]) -> bool:
        """Return whether a resumed run trains nothing of the current epoch."""
        over = target["finished"] or self._is_last(target)
        return bool(self.epoch < target["epoch"] or (self.epoch == target["epoch"] and over))

    def _skip_epoch(self, loader: Any, batches: Callable[[], Iterator[Any]], target: Mapping[str, Any]) -> None:
        """Train nothing of an epoch. Draw its batches if workers that live across epochs need them."""
        if not self._original:
            self._original = {name: getattr(self.args, name) for name in _SKIPPED_EPOCH if hasattr(self.args, name)}
            for name in self._original:
                setattr(self.args, name, _SKIPPED_EPOCH[name])
            self.accelerator.log = lambda *args, **kwargs: None
        began = self._last_skipped(target) if _is_persistent(loader) and not self._is_last(target) else None
        if began is None:
            loader.iteration += 1
            return
        self._begin_again(began)
        for _ in batches():
            pass

    def _last_skipped(self, target: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the start of the current epoch if the next one is trained; else None."""
        if target["finished"]:
            return target if self.epoch == target["epoch"] else None
        return target["earlier"] if self.epoch == target["epoch"] - 1 else None

    @contextlib.contextmanager
    def _watched(self, loader: Any, skipped: int = 0, loaded: dict[str, Any] | None = None) -> Iterator[None]:
        """Keep the random state from before each batch is loaded; set it to ``loaded`` before the first that is not skipped."""
        base = getattr(loader, "base_dataloader", None)
        if base is None or base.num_workers:
            self._loaded = None
            yield
            return
        load = base.__iter__

        def watch() -> Iterator[Any]:
            batches = load()
            for number in itertools.count():
                if loaded is not None and number == skipped:
                    _set_host_random_state(loaded)
                    data_order.set_steps(loader, loaded.get("steps"))
                self._loaded = {**_host_random_state(), "steps": data_order.steps(loader)}
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                yield batch

        base.__iter__ = watch
        try:
            yield
        finally:
            vars(base).pop("__iter__", None)

    def _after_each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._has_left_step = True
            if self._new_states or self._is_due:  # the loop has finished saving, sampling and logging for this step
                self._save_next_random_state()

    def _finish_resume(self, target: dict[str, Any], frame: FrameType | None) -> None:
        self._target = None
        for name, value in self._original.items():
            setattr(self.args, name, value)
        self._original = {}
        vars(self.accelerator).pop("log", None)
        # The loop may take its batches through a wrapper, so search the callers too.
        while frame is not None and not isinstance(frame.f_locals.get("global_step"), int):
            frame = frame.f_back
        if frame is None or not _set_local(frame, "global_step", self.step):
            stop(f"cannot resume: no local `global_step` found in this script; use {self.way_out}")
        if (bar := frame.f_locals.get("progress_bar")) is not None:
            _set_initial_step(bar, self.step)
        if self._loaded_parts is not None:
            self._loaded_parts.restore("optimizer_eval_fn" in frame.f_locals and not target.get("left", False))
            self._loaded_parts = None
        set_random_state(self._random)
        self._warn_of_differences(target)
        journal.event("resume", step=self.step, file=self.args.resume)
        where = f", in epoch {self.epoch + 1} after {self.batch} batches" if self._loader is not None else ""
        note(f"resumed after step {self.step}{where}")

    def _warn_of_differences(self, target: Mapping[str, Any]) -> None:
        base = getattr(self._loader, "base_dataloader", None)
        differences = [*gradient_differences(Path(self.args.resume or ""), target)]
        if base is not None:
            differences += data_order.inexact(self._loader, base.num_workers, _is_persistent(self._loader))
        for difference in differences:
            warn(f"the result will differ from an uninterrupted run: {difference}")


def _start(args: Namespace) -> list[int | None]:
    """Return the first step and the first epoch of a LoRA script's loop; None where that is the first of all."""
    step, epoch = getattr(args, "initial_step", None), getattr(args, "initial_epoch", None)
    return [step or None, epoch if epoch != 1 else None]


def _is_persistent(loader: Any) -> bool:
    """Return whether the data-loader workers live across epochs."""
    base = getattr(loader, "base_dataloader", None)
    return bool(base is not None and base.num_workers and getattr(base, "persistent_workers", False))


def _set_initial_step(bar: Any, step: int) -> None:
    """Set the first step of a tqdm bar, so that its rate and remaining time cover only the steps to come."""
    bar.initial = bar.n = bar.last_print_n = step
    bar.start_t = bar.last_print_t = time.time()
    bar.refresh()


def _set_local(frame: FrameType, name: str, value: int) -> bool:
    """Set a local integer of a running function, as debuggers do; return whether that worked.

    The step count is a local variable of each script's ``train``, out of reach for the functions that it calls.
    """
    frame.f_locals[name] = value
    if sys.version_info < (3, 13):  # from 3.13 on, f_locals writes through (PEP 667)
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return bool(frame.f_locals[name] == value)


# --- random state ----------------------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return the random state of Python, numpy, torch and every CUDA device, in types that ``weights_only`` loads."""
    import torch

    return {**_host_random_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _host_random_state() -> dict[str, Any]:
    import numpy
    import torch

    state: Any = numpy.random.get_state(legacy=True)
    kind, keys, *rest = state
    links = log_links.remembered()
    return {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state(), "links": links}


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a random state. Warns when the number of GPUs differs, because the result will too."""
    import torch

    _set_host_random_state(state)
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    elif state["cuda"] or torch.cuda.is_available():
        warn(
            f"the state was saved with {len(state['cuda'])} GPUs, but there are {torch.cuda.device_count()}: "
            "the result will differ from an uninterrupted run"
        )


def _set_host_random_state(state: dict[str, Any]) -> None:
    import numpy
    import torch

    if "links" in state:
        log_links.remember(state["links"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(state["torch"])


# --- finding states --------------------------------------------------------------------------------------------------


def newest_state(folder: Path, name: str | None) -> Path | None:
    """Return the newest complete state of an output name, or None; only this process's run counts where it is known."""
    running = run_record.current()
    for state in _newest_first(folder, name):
        record = run_record.read(state)
        if running is not None and record is not None and record.id != running.id:
            continue
        problem = state_problem(state)
        if problem is None:
            return state
        warn(f"skipping {state}: {problem}")
    return None


def state_to_resume(
    folder: Path, name: str | None, run: RunRecord, inexact: bool = False, elsewhere: Sequence[Path] = ()
) -> Path | None:
    """Return the state for ``--resume auto``: the newest complete one that belongs to ``run``, or None.

    ``elsewhere``: folders to which states of this output folder may have been saved, because it could not be written to.
    States without a record (saved by upstream) count as the run's. Raises UserError when every state of this run is
    damaged: silently starting over would lose that training. So does one that another program has open.
    """
    broken: dict[Path, str] = {}
    for state in _newest_first(folder, name, run, elsewhere):
        record = run_record.read(state)
        if record is not None and (differences := run.differences(record)):
            note(
                f"--resume auto: skipping {state.name}, saved by another run ({', '.join(differences)}); "
                f"use --resume {state} to resume it anyway"
            )
        elif (problem := unreadable(state)) is not None:
            raise UserError(f"--resume auto: {problem}")  # an older state would lose training
        elif (problem := state_problem(state, inexact)) is not None:
            broken[state] = f"{state.name}: {problem}"
        else:
            for line in broken.values():
                warn(f"--resume auto: {line}; resuming from an older state")
            return state
    if broken:
        raise UserError(
            f"--resume auto: every state in {folder} is damaged ({'; '.join(broken.values())}). Restore one from a backup"
            f"{max(map(inexact_advice, broken))}, or remove --resume to start from the beginning; the states are then renamed "
            "to NAME.previous"
        )
    return None


def _newest_first(folder: Path, name: str | None, run: RunRecord | None = None, elsewhere: Sequence[Path] = ()) -> list[Path]:
    def saved(state: Path) -> float:
        record = run_record.read(state)
        return record.saved if record is not None else state.stat().st_mtime

    def belongs_here(state: Path) -> bool:
        record = run_record.read(state)
        return record is not None and run is not None and record.has_same_output(run)

    others = (state for other in elsewhere for state in states(other, name and Path(name).name) if belongs_here(state))
    return sorted({*states(folder, name), *others}, key=saved, reverse=True)


def finished_model(state: Path, args: Namespace) -> Path | None:
    """Return the final model that a run has written after a state of its last step; None if there is none."""
    record = run_record.read(state)
    if record is None or record.step != args.max_train_steps or not getattr(args, "output_dir", None):
        return None
    newer = (model for model in final_models(Path(args.output_dir), args.output_name) if model.stat().st_mtime >= record.saved)
    return next(newer, None)


def stale_states(
    folder: Path, name: str | None, run: RunRecord, resumed: Path | None, elsewhere: Sequence[Path] = ()
) -> list[Path]:
    """Return this output name's states that ``run`` does not continue: of an earlier run, or of steps after ``resumed``.

    ``elsewhere``: see :func:`state_to_resume`. Without ``resumed`` every state is stale; with it, states without a record
    are not.
    """
    candidates = _newest_first(folder, name, run, elsewhere)
    if resumed is None:
        return candidates
    origin = run_record.read(resumed)
    stale = []
    for state in candidates:
        record = run_record.read(state)
        if origin is None or record is None or state.resolve() == resumed.resolve():
            continue
        if record.id != run.id or record.step > origin.step:
            stale.append(state)
    return stale


def unreadable(state: Path) -> str | None:
    """Return which file of a state cannot be read, after waiting for other programs to close it, and a remedy; else None."""
    for file in sorted(path for path in state.rglob("*") if path.is_file()):
        try:
            patiently(lambda file=file: file.open("rb").close())  # type: ignore[misc]
        except OSError as error:
            if not is_open(error):
                return f"{file} cannot be read: {error.strerror or error}; allow it"
            return (
                f"{file} is open in another program, which lets no other read it; close that program, or pause the indexer, "
                "virus scanner or cloud synchronization of this folder, and start again"
            )
    return None


def state_problem(state: Path, inexact: bool = False) -> str | None:
    """Return why a state cannot be resumed, or None when its files are complete.

    ``inexact``: accept a missing or damaged random state.
    """
    if (problem := unreadable(state)) is not None:
        return problem
    record = run_record.read(state)
    if record is not None:
        sizes = {name: (state / name).stat().st_size for name in record.files if (state / name).is_file()}
        for name, size in record.files.items():
            if inexact and name.startswith("random_states_"):
                continue
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != size:
                return f"{name} is truncated: {sizes[name]} of {size} bytes"
    elif missing := _missing(state, inexact):
        return missing
    for file in sorted(state.iterdir()):
        if inexact and file.name.startswith("random_states_"):
            continue
        if file.suffix == ".safetensors":
            try:
                read_header(file)
            except ValueError as error:
                return str(error)
        elif file.suffix in (".bin", ".pkl", ".pt") and not _is_complete_zip(file):
            return f"{file.name} is damaged"
    return None


def inexact_advice(state: Path) -> str:
    """Return the advice to resume a state whose only damage is its random state; empty for other damage."""
    repairable = state_problem(state, inexact=True) is None
    return ", or add --inexact_resume to resume with other random numbers" if repairable else ""


def _missing(state: Path, inexact: bool) -> str | None:
    """Return which of accelerate's files a state lacks. DeepSpeed stores weights and optimizer in a folder."""
    names = [path.name for path in state.iterdir()]
    needed = ["scheduler.bin", *([] if inexact else ["random_states_0.pkl"])]
    if not any(path.is_dir() for path in state.iterdir()):
        needed.append("optimizer.bin")
    missing = [name for name in needed if name not in names]
    if not any(name.startswith(("model", "pytorch_model")) for name in names):
        missing.append("model.safetensors")
    return f"{' and '.join(missing)} missing" if missing else None


def _is_complete_zip(file: Path) -> bool:
    """Return whether a file written by torch.save is complete; checksums of large files are not verified."""
    try:
        with zipfile.ZipFile(file) as archive:
            return file.stat().st_size > _CHECKSUM_LIMIT or archive.testzip() is None
    except (OSError, ValueError, zipfile.BadZipFile):
        return False


def random_state_problem(folder: Path, process: int) -> str | None:
    """Return why a state's random state cannot be restored, or None. accelerate only logs a failure and trains on."""
    if (folder / FILE).is_file():
        return None  # the position file holds the random state
    import torch

    allow_numpy_states()
    file = folder / f"random_states_{process}.pkl"
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        missing = {"random_state", "numpy_random_seed", "torch_manual_seed"} - saved.keys()
    except Exception as error:  # a damaged pickle can raise anything
        return f"{file.name} cannot be read ({type(error).__name__}: {error})"
    return f"{file.name} has no {', '.join(sorted(missing))}" if missing else None


def allow_numpy_states() -> None:
    """Let ``torch.load`` read the random states that accelerate pickles.

    PyTorch 2.6 and newer refuse numpy's types. accelerate before 1.1 does not allow them, so it loads no random state, and ends
    with ``KeyError: 'step'``.
    """
    import numpy
    import torch

    seeds: Any = numpy.empty(0, numpy.uint32)
    reconstruct = seeds.__reduce__()[0]  # numpy 1 and 2 have it in different modules
    torch.serialization.add_safe_globals([reconstruct, numpy.ndarray, numpy.dtype, type(seeds.dtype), _codecs.encode])


def position() -> Position | None:
    """Return the position of this process's run; None when no patch tracks it."""
    return current(Position)
