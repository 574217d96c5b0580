"""Dispatch a script's training loop to the callbacks of patches. The loop itself is patched only once.

Every training script of sd-scripts creates its accelerator with ``prepare_accelerator(args)``, takes batches from a loader
that accelerate has prepared, and runs each micro-batch in ``with accelerator.accumulate(...)``. The code after that block
(counting the step, saving, sampling) reads ``args`` again. :class:`TrainingLoop` replaces these three functions. A patch
registers a :class:`TrainingCallback`, which is created for each run and holds the patch's state, and a :class:`Stage`, which
decides the order.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, cast

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.patching.step_values import StepValues
from kohya_ext.patching.types import Accelerator, Batch, DataSet
from kohya_ext.sdscripts.checkouts import Checkout


class Stage(IntEnum):
    """The nesting order of patches around sd-scripts' code, from the innermost stage to the outermost.

    A later stage wraps the earlier ones. Replacements of the same function are applied in the order of the stages.
    ``before_batch`` runs from the last stage to the first and ``after_batch`` from the first to the last. So after a batch a
    callback can rely on the work of earlier stages. Before the first batch, a check of a later stage can end the run before
    an earlier stage has changed anything. Patches of the same stage must not depend on each other and must not replace the
    same function.
    """

    WRITE = auto()
    """Writes files. Innermost, so that a later stage can prevent saving, and so that an earlier run's files are moved only
    if no check has ended this run before its first step."""
    RECORD = auto()
    """Records the model's passes. Inside COMPUTE, whose replacements run before the recorded pass in every step."""
    COMPUTE = auto()
    """Changes how a step is computed: learning rate, weight averaging, trained parameters, compilation, recomputation. It
    completes the step after the batch (restores the schedule's learning rate, updates the average), so that states saved
    by later stages include the whole step."""
    FUSE = auto()
    """Replaces a whole operation, and falls back to the operation as changed by COMPUTE."""
    COUNT = auto()
    """Counts the step. Every later stage reads the count: for a message, a file name or a saved state."""
    GUARD = auto()
    """Decides whether the step is valid, and records the last valid one. Before SAVE, so that a bad step is not saved, and
    before STOP, so that a guard can end the run after the same step."""
    SAVE = auto()
    """Saves states on a schedule. Before STOP, so that changes of the script's arguments by STOP cannot affect it."""
    STOP = auto()
    """Ends the run after a step. ``before_batch`` exits the loop before any earlier stage begins another step."""
    OBSERVE = auto()
    """Checks or measures the whole step, including the work of all other stages. Outermost, so that a failed check ends the
    run before anything has changed."""
    VALIDATE = auto()
    """Computes the validation loss between two steps. After OBSERVE, which must not count it as part of a step."""


class TrainingCallback:
    """A patch's callbacks and state in one training run. A subclass overrides the methods that it needs."""

    def before_batch(self, accelerator: Accelerator) -> None:
        """Run before each micro-batch. At the first one, models, optimizer and loader have been prepared."""

    def after_batch(self, accelerator: Accelerator) -> None:
        """Run after each micro-batch without an exception, after the optimizer and before the script counts the step.

        ``accelerator.sync_gradients`` is true if the optimizer has stepped.
        """

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Return the batches of one pass over the training data, by default those of ``batches()``.

        ``loop`` is the frame of the training loop, or of a function through which the loop takes its batches.
        """
        return batches()

    def on_state_save(self, folder: Path) -> None:
        """Write to a saved state's folder before accelerate writes its files. Called in every process."""

    def on_state_load(self, folder: Path) -> None:
        """Read from a saved state's folder before accelerate reads its files. Called in every process."""

    def on_peer_failure(self, failure: Any) -> None:
        """Save this process's part after another one has failed: a :class:`kohya_ext.run.ranks.Failure`.

        Called in another thread, while the main thread may be waiting in a collective operation. The process then ends.
        """

    def on_end(self) -> None:
        """Undo changes outside the run, such as signal handlers.

        Called when the patches are undone or another run starts in this process, but not when the process exits.
        """


OnStart = Callable[[Namespace, Accelerator, Settings], TrainingCallback | None]
"""(args, accelerator, settings) -> a patch's callback for the run, or None if the patch has none.

Called when the script has created its accelerator, before it loads models. The script keeps using the object ``args``.
"""

C = TypeVar("C", bound=TrainingCallback)


@dataclass(frozen=True)
class Program:
    """The checkout and the command line of this process."""

    checkout: Checkout | None = None
    command: CommandLine = field(default_factory=lambda: CommandLine(None, (), {}))
    """The training script's command line. In any other program it has no script."""


@dataclass
class TrainingRun:
    """One run of a training loop."""

    accelerator: Accelerator
    program: Program = field(default_factory=Program)
    callbacks: list[TrainingCallback] = field(default_factory=list)
    """Callbacks in the order of their stages."""
    batch: Batch | None = None
    """The last batch of the loader in use; None if it is not a dict."""
    step_values: StepValues = field(default_factory=StepValues)
    """Losses and gradient norm since the last optimizer step."""

    def callback(self, kind: type[C]) -> C | None:
        """Return the callback of a class; None if its patch has no callback in this run."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def before_batch(self, accelerator: Accelerator) -> None:
        """Call all callbacks, the last stage first."""
        for callback in reversed(self.callbacks):
            callback.before_batch(accelerator)

    def after_batch(self, accelerator: Accelerator) -> None:
        """Call all callbacks, the first stage first."""
        for callback in self.callbacks:
            callback.after_batch(accelerator)
        if accelerator.sync_gradients:
            self.step_values = StepValues()

    def on_state_save(self, models: Any, weights: Any, folder: str) -> None:
        """Call all callbacks; a hook of ``accelerator.save_state``."""
        for callback in self.callbacks:
            callback.on_state_save(Path(folder))

    def on_state_load(self, models: Any, folder: str) -> None:
        """Call all callbacks; a hook of ``accelerator.load_state``."""
        for callback in self.callbacks:
            callback.on_state_load(Path(folder))

    def is_training_loader(self, loader: Any) -> bool:
        """Return whether a loader is the training data's, which scripts prepare first."""
        return loader is next(iter(self.accelerator._dataloaders), None)

    def recorded(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and set :attr:`batch` to each of them until the next one is requested."""
        batch = None
        try:
            for batch in batches:
                self.batch = cast(Batch, batch) if isinstance(batch, dict) else None
                yield batch
        finally:
            if self.batch is batch:
                self.batch = None


_current: TrainingRun | None = None


@dataclass(eq=False)
class TrainingLoop:
    """The replacements of the three functions, which call the callbacks of the current run."""

    starts: Callable[[], Iterable[OnStart]]
    """Returns the start functions of the enabled patches, in the order of their stages."""
    program: Program = field(default_factory=Program)
    run: TrainingRun | None = None

    def begin(self, args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
        """Start a run and create its callbacks. Ends the previous run."""
        global _current
        self.end()
        self.run = _current = run = TrainingRun(accelerator, self.program)
        for start in self.starts():
            if (callback := start(args, accelerator, settings)) is not None:
                run.callbacks.append(callback)
        accelerator.register_save_state_pre_hook(run.on_state_save)
        accelerator.register_load_state_pre_hook(run.on_state_load)

    def end(self) -> None:
        """End the current run, if any."""
        global _current
        run, self.run = self.run, None
        if run is not None:
            for callback in reversed(run.callbacks):
                callback.on_end()
            if _current is run:
                _current = None

    def prepare_accelerator(self, original: Any, settings: Settings) -> Any:
        """Return a ``prepare_accelerator`` that also starts a run."""

        @wraps(original)
        def prepare_accelerator(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
            accelerator = original(args, *rest, **kwargs)
            self.begin(args, accelerator, settings)
            return accelerator

        return prepare_accelerator

    def accumulate(self, original: Any, settings: Settings) -> Any:
        """Return an ``Accelerator.accumulate`` that also runs the callbacks of the batch."""
        loop = self

        @wraps(original)
        @contextlib.contextmanager
        def accumulate(self: Any, *models: Any) -> Iterator[None]:
            run = loop.run
            if run is not None:
                run.before_batch(self)
            with original(self, *models):
                yield
            if run is not None:
                run.after_batch(self)

        return accumulate

    def iterate(self, original: Any, settings: Settings) -> Any:
        """Return a ``DataLoaderShard.__iter__`` that records the batch and lets callbacks change the training batches."""
        loop = self

        @wraps(original)
        def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
            run = loop.run
            if run is None:
                yield from original(self)
                return
            batches = partial(original, self)
            if run.is_training_loader(self):
                # The caller of this frame is the training loop, because enumerate() has no frame.
                caller = sys._getframe().f_back
                for callback in run.callbacks:
                    batches = partial(callback.batches, self, batches, caller)
            yield from run.recorded(batches())

        return __iter__


def current(kind: type[C]) -> C | None:
    """Return the callback of a class in this process's run; None without a run or if its patch has no callback."""
    return _current.callback(kind) if _current is not None else None


def callbacks() -> Sequence[TrainingCallback]:
    """Return the callbacks of this process's run in the order of their stages; empty without a run."""
    return tuple(_current.callbacks) if _current is not None else ()


def program() -> Program:
    """Return the program of this process's run; an empty one without a run."""
    return _current.program if _current is not None else Program()


def current_batch() -> Batch:
    """Return the current micro-batch of the training loop; empty if there is none."""
    return (_current.batch if _current is not None else None) or {}


def step_values() -> StepValues:
    """Return the losses and the gradient norm of the current optimizer step; new ones without a run."""
    return _current.step_values if _current is not None else StepValues()


def trained_weights(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield all trained parameters of the optimizers, in order."""
    return (weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"])


def data_sets(accelerator: Accelerator) -> list[DataSet]:
    """Return sd-scripts' training datasets that have buckets; empty until the script has prepared its loader."""
    loader = next(iter(accelerator._dataloaders), None)
    group = getattr(loader, "dataset", None)
    members = getattr(group, "datasets", [group])
    return [data_set for data_set in members if getattr(data_set, "bucket_manager", None) is not None]
