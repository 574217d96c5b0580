"""The training loop of a script, patched once, and the patches that take part in it.

Every training script of sd-scripts makes its accelerator with ``prepare_accelerator(args)``, takes batches from a loader that
accelerate has prepared, and puts each micro-batch into ``with accelerator.accumulate(...)``; what follows that block (counting
the step, saving, sampling) reads ``args`` again. :class:`TrainingLoop` replaces these three functions. A patch takes part with
a :class:`TrainingCallback`, which is made for each run and holds what the patch knows about it, and a :class:`Stage`, which
decides the order.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from kohya_ext.config.settings import Settings
from kohya_ext.sdscripts.checkouts import Checkout

if TYPE_CHECKING:  # its import takes longer than that of all patches
    from kohya_ext.config.arguments import RunArguments


class Stage(IntEnum):
    """How a patch is nested around sd-scripts' own code and the other patches, from the innermost stage to the outermost.

    A later stage wraps the earlier ones. Replacements of the same function are applied in the order of the stages.
    ``before_batch`` runs from the last stage to the first and ``after_batch`` from the first to the last. So after a batch a
    callback can rely on what earlier stages have done, and before the first batch a check of a later stage ends the run before
    an earlier stage has changed anything. Patches of the same stage must not depend on each other and must not replace the
    same function.
    """

    WRITE = auto()
    """Writes files. Innermost, so that a later stage can refuse to save, and so that an earlier run's files are moved only
    when nothing has stopped this run before its first step."""
    COMPUTE = auto()
    """Changes how a step is computed: learning rate, average of the weights, what is trained, compiled or recomputed. After
    the batch it completes the step (puts the schedule's learning rate back, updates the average), so that states saved by
    later stages hold the whole step."""
    FUSE = auto()
    """Replaces a whole operation. It falls back to what COMPUTE has made of the operation."""
    COUNT = auto()
    """Counts the step. Every later stage reads the count: for a message, a file name or a saved state."""
    GUARD = auto()
    """Decides whether the step is good, and remembers the last good one. Before SAVE, so that a bad step is not saved, and
    before STOP, which a guard may ask to end the run after the same step."""
    SAVE = auto()
    """Saves a state on its own schedule. Before STOP, whose changes to the script's arguments then cannot affect it."""
    STOP = auto()
    """Ends the run after a step. ``before_batch`` leaves the loop before any earlier stage begins another step."""
    OBSERVE = auto()
    """Checks or measures the whole step, the work of all other stages included. Outermost, so that a run that its checks
    stop has changed nothing."""


class TrainingCallback:
    """A patch's part in one training run. A subclass holds the patch's state and overrides the methods that it needs."""

    def before_batch(self, accelerator: Any) -> None:
        """Run before each micro-batch. When the first one begins, everything has been prepared."""

    def after_batch(self, accelerator: Any) -> None:
        """Run after each micro-batch that raised nothing, when the optimizer has stepped and before the script counts it.

        ``accelerator.sync_gradients`` says whether the optimizer has stepped.
        """

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Return the batches of one pass over the training data, by default those of ``batches()``.

        ``loop`` is the frame of the training loop, or of a function that it takes its batches through.
        """
        return batches()

    def on_state_save(self, folder: Path) -> None:
        """Add to a state, before accelerate writes its own files into ``folder``. Called in every process."""

    def on_state_load(self, folder: Path) -> None:
        """Read from a state, before accelerate reads its own files. Called in every process."""

    def on_end(self) -> None:
        """Take back what was changed outside the run: signal handlers, for example.

        Called when the patches are undone or another run starts in this process, not when the process ends.
        """


OnStart = Callable[[Namespace, Any, Settings], TrainingCallback | None]
"""(args, accelerator, settings) -> a patch's callback for the run, or None where it takes no part.

Called once the script has made its accelerator. ``args`` is the object that the script goes on reading. Models are not loaded
yet.
"""

C = TypeVar("C", bound=TrainingCallback)


@dataclass(frozen=True)
class Command:
    """What runs in this process."""

    checkout: Checkout | None = None
    script: str = ""
    """The training script's file name; empty in another program."""
    arguments: RunArguments | None = None


@dataclass
class TrainingRun:
    """One run of a training loop."""

    accelerator: Any
    command: Command = field(default_factory=Command)
    callbacks: list[TrainingCallback] = field(default_factory=list)
    """In the order of their stages."""
    batch: object = None
    """What the loader in use has handed out last."""

    def callback(self, kind: type[C]) -> C | None:
        """Return the callback of a class; None when its patch takes no part."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def before_batch(self, accelerator: Any) -> None:
        """Call every callback, the last stage first."""
        for callback in reversed(self.callbacks):
            callback.before_batch(accelerator)

    def after_batch(self, accelerator: Any) -> None:
        """Call every callback, the first stage first."""
        for callback in self.callbacks:
            callback.after_batch(accelerator)

    def on_state_save(self, models: Any, weights: Any, folder: str) -> None:
        """Call every callback; a hook of ``accelerator.save_state``."""
        for callback in self.callbacks:
            callback.on_state_save(Path(folder))

    def on_state_load(self, models: Any, folder: str) -> None:
        """Call every callback; a hook of ``accelerator.load_state``."""
        for callback in self.callbacks:
            callback.on_state_load(Path(folder))

    def trains_on(self, loader: Any) -> bool:
        """Return whether a loader is that of the training data, which scripts prepare first."""
        return loader is next(iter(self.accelerator._dataloaders), None)

    def noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, each of which is :attr:`batch` until the next one is asked for."""
        batch = None
        try:
            for batch in batches:
                self.batch = batch
                yield batch
        finally:
            if self.batch is batch:
                self.batch = None


_current: TrainingRun | None = None


@dataclass(eq=False)
class TrainingLoop:
    """The replacements of the three functions, which call the callbacks of the present run."""

    starts: Callable[[], Iterable[OnStart]]
    """Returns what the patches that are on do when a run starts, in the order of their stages."""
    command: Command = field(default_factory=Command)
    run: TrainingRun | None = None

    def begin(self, args: Namespace, accelerator: Any, settings: Settings) -> None:
        """Start a run: make its callbacks. A run that went on before is ended."""
        global _current
        self.end()
        self.run = _current = run = TrainingRun(accelerator, self.command)
        for start in self.starts():
            if (callback := start(args, accelerator, settings)) is not None:
                run.callbacks.append(callback)
        accelerator.register_save_state_pre_hook(run.on_state_save)
        accelerator.register_load_state_pre_hook(run.on_state_load)

    def end(self) -> None:
        """End the run, if there is one."""
        global _current
        run, self.run = self.run, None
        if run is not None:
            for callback in reversed(run.callbacks):
                callback.on_end()
            if _current is run:
                _current = None

    def prepare_accelerator(self, original: Any, settings: Settings) -> Any:
        """Return sd-scripts' ``prepare_accelerator`` that also starts the run."""

        @wraps(original)
        def prepare_accelerator(args: Namespace, *rest: Any, **kwargs: Any) -> Any:
            accelerator = original(args, *rest, **kwargs)
            self.begin(args, accelerator, settings)
            return accelerator

        return prepare_accelerator

    def accumulate(self, original: Any, settings: Settings) -> Any:
        """Return ``Accelerator.accumulate`` that calls the callbacks around the batch."""
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
        """Return ``DataLoaderShard.__iter__`` that notes the batch, and lets the callbacks decide on the training batches."""
        loop = self

        @wraps(original)
        def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
            run = loop.run
            if run is None:
                yield from original(self)
                return
            batches = partial(original, self)
            if run.trains_on(self):
                # This frame's caller is the loop that takes the batches; enumerate() leaves no frame.
                caller = sys._getframe().f_back
                for callback in run.callbacks:
                    batches = partial(callback.batches, self, batches, caller)
            yield from run.noting(batches())

        return __iter__


def current(kind: type[C]) -> C | None:
    """Return the callback of a class in this process's run; None when there is no run or its patch takes no part."""
    return _current.callback(kind) if _current is not None else None


def command() -> Command:
    """Return what the run in this process was started with; an empty one when there is no run."""
    return _current.command if _current is not None else Command()


def current_batch() -> dict[str, Any]:
    """Return the micro-batch that the training loop works on; empty when there is none."""
    batch = _current.batch if _current is not None else None
    return batch if isinstance(batch, dict) else {}


def trained_weights(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Yield every weight in some optimizers, in their order."""
    return (weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"])


def data_sets(accelerator: Any) -> list[Any]:
    """Return sd-scripts' data sets of the training, each with its buckets; none before the script has prepared its loader."""
    loader = next(iter(accelerator._dataloaders), None)
    group = getattr(loader, "dataset", None)
    found = getattr(group, "datasets", [group])
    return [found_one for found_one in found if getattr(found_one, "bucket_manager", None) is not None]
