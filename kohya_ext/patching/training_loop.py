"""Dispatch a script's training loop to the callbacks of patches. The loop itself is patched only once.

Every training script of sd-scripts creates its accelerator with ``prepare_accelerator(args)``, takes batches from a loader
that accelerate has prepared, and runs each micro-batch in ``with accelerator.accumulate(...)``. The code after that block
(counting the step, saving, sampling) reads ``args`` again. :class:`TrainingLoop` replaces these three functions, and those
that begin a backward pass and an optimizer step. A patch registers a :class:`TrainingCallback`, which is created for each run
and holds the patch's state, and a :class:`Stage`, which decides the order.

An exception that ends a run reaches the callbacks once, from one of two places. Python calls ``sys.excepthook`` for one that
nothing catches, after the traceback is printed by the hook of before. A program that imports a trainer may catch it (a GUI, a
notebook), so the function that trains is replaced, too, and calls them if any of its callers is not sd-scripts or the launcher.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial, wraps
from pathlib import Path
from types import FrameType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.console import warn
from kohya_ext.errors import first_line
from kohya_ext.patching.attributes import Replacement, replace_attribute
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
    CHOOSE = auto()
    """Chooses which of the earlier stages' features are used, and compares their passes."""
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
    """A patch's callbacks and state in one training run. A subclass overrides the methods that it needs.

    An exception in one of them ends the run, except in a patch that only observes (``Patch.observes``) and in ``on_exception``
    and ``on_exit``: there it is a warning, and the run and the other callbacks continue.
    """

    def before_data(self) -> None:
        """Run before the loop takes a training batch, when it has finished saving, sampling and logging for the last one."""

    def after_data(self) -> None:
        """Run after the loop has taken a training batch, or when there is none left in this epoch."""

    def before_training(self, accelerator: Accelerator) -> None:
        """Run once, when models, optimizer and loader are prepared and a state is loaded: before the first micro-batch.

        A resumed run may have no step left. Then it is run before the script writes the final model.
        """

    def before_batch(self, accelerator: Accelerator) -> None:
        """Run before each micro-batch; before the first one directly after ``before_training``."""

    def after_batch(self, accelerator: Accelerator) -> None:
        """Run after each micro-batch without an exception, after the optimizer and before the script counts the step.

        ``accelerator.sync_gradients`` is true if the optimizer has stepped.
        """

    def before_backward(self) -> None:
        """Run before each backward pass. Fused optimizers step during it."""

    def before_optimizer_step(self) -> None:
        """Run before an optimizer changes weights. Not called for a step that a patch skips, and with DeepSpeed."""

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Return the batches of one pass over the training data, by default those of ``batches()``.

        ``loop`` is the frame of the training loop, or of a function through which the loop takes its batches.
        """
        return batches()

    def other_batches(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the batches of one pass over a prepared loader of other data, by default those of ``batches()``."""
        return batches()

    def after_validation(self, evaluation: Any) -> None:
        """Run after a validation: a :class:`kohya_ext.run.evaluations.Evaluation`, in every process."""

    def after_training(self) -> None:
        """Run once when the script has trained all steps, or a stop has completed the run. Its last model is saved."""

    def on_state_save(self, folder: Path) -> None:
        """Write to a saved state's folder before accelerate writes its files. Called in every process."""

    def on_state_load(self, folder: Path) -> None:
        """Read from a saved state's folder before accelerate reads its files. Called in every process."""

    def on_peer_failure(self, failure: Any) -> None:
        """Save this process's part after another one has failed: a :class:`kohya_ext.run.ranks.Failure`.

        Called in another thread, while the main thread may be waiting in a collective operation. The process then ends.
        """

    def on_exception(self, problem: BaseException) -> None:
        """Run once when an exception other than SystemExit has left the training loop. The first stage runs first."""

    def on_exit(self) -> None:
        """Run when the process exits during the run. The last stage runs first."""

    def on_end(self) -> None:
        """Undo changes outside the run, such as signal handlers.

        Called when the patches are undone or another run starts in this process, but not when the process exits.
        """


OnStart = Callable[[Namespace, Accelerator, Settings], TrainingCallback | None]
"""(args, accelerator, settings) -> a patch's callback for the run, or None if the patch has none.

Called when the script has created its accelerator, before it loads models. The script keeps using the object ``args``.
"""

C = TypeVar("C", bound=TrainingCallback)
R = TypeVar("R")


@dataclass(frozen=True)
class Participant:
    """A patch that takes part in training runs."""

    name: str
    start: OnStart
    observes: bool = False
    """Whether a failure of its callback is a warning and never ends the run."""


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
    problem: BaseException | None = None
    """The exception that has ended the run."""
    has_begun: bool = False
    """Whether ``before_training`` was called."""
    _observers: dict[int, str] = field(default_factory=dict)
    """id() of a callback that only observes -> name of its patch."""
    _failed: set[str] = field(default_factory=set)
    """Patches whose failure was reported."""

    def start(self, patch: Participant, args: Namespace, settings: Settings) -> None:
        """Create and add a patch's callback."""
        try:
            callback = patch.start(args, self.accelerator, settings)
        except Exception as problem:
            if not patch.observes:
                raise
            self._warn(patch.name, problem)
            return
        if callback is not None:
            self.callbacks.append(callback)
            if patch.observes:
                self._observers[id(callback)] = patch.name

    def guarded(self, callback: TrainingCallback, action: Callable[[], R], otherwise: Callable[[], R]) -> R:
        """Call an action of a callback. If a callback that only observes fails, warn once and return ``otherwise()``."""
        try:
            return action()
        except Exception as problem:
            name = self._observers.get(id(callback))
            if name is None:
                raise
            self._warn(name, problem)
            return otherwise()

    def _warn(self, patch: str, problem: Exception) -> None:
        if patch not in self._failed:
            self._failed.add(patch)
            with contextlib.suppress(Exception):  # the warning is a line of the journal, which may be at fault
                warn(f"the patch {patch} failed, so its output is incomplete: {first_line(problem)}; training continues")

    def _each(self, method: str, *arguments: Any, reverse: bool = False) -> None:
        """Call a method of all callbacks, the first stage first, or last if ``reverse``."""
        for callback in tuple(reversed(self.callbacks) if reverse else self.callbacks):
            self.guarded(callback, partial(getattr(callback, method), *arguments), _nothing)

    def _last(self, method: str, *arguments: Any, reverse: bool = False) -> None:
        """Call a method of all callbacks in a run that ends, whatever one of them raises."""
        for callback in tuple(reversed(self.callbacks) if reverse else self.callbacks):
            try:
                getattr(callback, method)(*arguments)
            except Exception as problem:
                self._warn(self._observers.get(id(callback), type(callback).__module__.rpartition(".")[2]), problem)

    def callback(self, kind: type[C]) -> C | None:
        """Return the callback of a class; None if its patch has no callback in this run."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def before_training(self) -> None:
        """Call all callbacks, the last stage first, in a run that trains no batch."""
        self.has_begun = True
        self._each("before_training", self.accelerator, reverse=True)

    def before_batch(self, accelerator: Accelerator) -> None:
        """Call all callbacks, the last stage first."""
        begins, self.has_begun = not self.has_begun, True
        for callback in tuple(reversed(self.callbacks)):
            if begins:
                self.guarded(callback, partial(callback.before_training, accelerator), _nothing)
            self.guarded(callback, partial(callback.before_batch, accelerator), _nothing)

    def after_batch(self, accelerator: Accelerator) -> None:
        """Call all callbacks, the first stage first."""
        self._each("after_batch", accelerator)
        if accelerator.sync_gradients:
            self.step_values = StepValues()

    def on_state_save(self, models: Any, weights: Any, folder: str) -> None:
        """Call all callbacks; a hook of ``accelerator.save_state``."""
        self._each("on_state_save", Path(folder))

    def before_backward(self) -> None:
        """Call all callbacks."""
        self._each("before_backward")

    def before_optimizer_step(self) -> None:
        """Call all callbacks."""
        self._each("before_optimizer_step")

    def on_exception(self, problem: BaseException) -> None:
        """Call all callbacks, once per run."""
        if self.problem is None:
            self.problem = problem
            self._last("on_exception", problem)

    def after_training(self) -> None:
        """Call all callbacks; a failure of one is a warning, because everything is saved."""
        self._last("after_training")

    def on_exit(self) -> None:
        """Call all callbacks, the last stage first."""
        self._last("on_exit", reverse=True)

    def on_state_load(self, models: Any, folder: str) -> None:
        """Call all callbacks; a hook of ``accelerator.load_state``."""
        self._each("on_state_load", Path(folder))

    def is_training_loader(self, loader: Any) -> bool:
        """Return whether a loader is the training data's, which scripts prepare first."""
        return loader is next(iter(self.accelerator._dataloaders), None)

    def batches(self, loader: Any, batches: Callable[[], Iterator[Any]], loop: FrameType | None) -> Iterator[Any]:
        """Return the batches of one pass over a loader, as the callbacks change them."""
        if not self.is_training_loader(loader):
            for callback in self.callbacks:
                batches = partial(callback.other_batches, batches)
            return batches()
        for callback in self.callbacks:
            batches = partial(self.guarded, callback, partial(callback.batches, loader, batches, loop), batches)
        return self._watched(batches())

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the training batches, and call all callbacks before and after each is taken."""
        while True:
            self._each("before_data")
            batch = next(batches, _END)
            self._each("after_data")
            if batch is _END:
                return
            yield batch

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


def _nothing() -> None:
    """Do nothing."""


_END = object()

_PACKAGE = Path(__file__).resolve().parents[1]

_COMMAND = "kohya-ext"
"""The installed command."""

_current: TrainingRun | None = None


@dataclass(eq=False)
class TrainingLoop:
    """The replacements of these functions, which call the callbacks of the current run."""

    participants: Callable[[], Iterable[Participant]]
    """Returns the enabled patches that take part, in the order of their stages."""
    program: Program = field(default_factory=Program)
    run: TrainingRun | None = None
    _hook: Callable[..., Any] | None = None
    """``sys.excepthook`` before this run."""
    _training_functions: list[Replacement] = field(default_factory=list)

    def begin(self, args: Namespace, accelerator: Accelerator, settings: Settings) -> None:
        """Start a run and create its callbacks. Ends the previous run."""
        global _current
        self.end()
        self.run = _current = run = TrainingRun(accelerator, self.program)
        self._hook, sys.excepthook = sys.excepthook, self.on_uncaught
        atexit.register(run.on_exit)
        for patch in self.participants():
            run.start(patch, args, settings)
        accelerator.register_save_state_pre_hook(run.on_state_save)
        accelerator.register_load_state_pre_hook(run.on_state_load)

    def end(self) -> None:
        """End the current run, if any."""
        global _current
        run, self.run = self.run, None
        if run is None:
            return
        atexit.unregister(run.on_exit)
        if sys.excepthook == self.on_uncaught and self._hook is not None:  # other code may have replaced it since
            sys.excepthook = self._hook
        run._last("on_end", reverse=True)
        if _current is run:
            _current = None

    def on_uncaught(self, kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
        """Print the traceback, then call the callbacks; the replacement of ``sys.excepthook``."""
        (self._hook or sys.__excepthook__)(kind, problem, trace)
        if self.run is not None:
            self.run.on_exception(problem)

    def replace_training_functions(self, frame: FrameType | None) -> None:
        """Replace the functions that train in the modules that call a frame, among them the script."""
        while frame is not None:
            module = sys.modules.get(frame.f_globals.get("__name__", ""))
            if module is not None and vars(module) is frame.f_globals:
                for owner, name, function in list(_training_functions(module)):
                    self._training_functions.append(replace_attribute(owner, name, self._train(function)))
            frame = frame.f_back

    def restore_training_functions(self) -> None:
        """Restore the functions that :meth:`replace_training_functions` has replaced."""
        while self._training_functions:
            self._training_functions.pop().undo()

    def _train(self, original: FunctionType) -> Any:
        @wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            try:
                result = original(*args, **kwargs)
            except BaseException as problem:
                run = self.run
                if run is not None and isinstance(problem, SystemExit) and problem.code == 0:
                    run.after_training()
                elif run is not None and not isinstance(problem, SystemExit) and self._may_be_caught(sys._getframe(1)):
                    run.on_exception(problem)
                raise
            if self.run is not None:
                self.run.after_training()
            return result

        return train

    def _may_be_caught(self, frame: FrameType | None) -> bool:
        """Return whether a frame or one of its callers may catch an exception: code other than sd-scripts and the launcher."""
        if threading.current_thread() is not threading.main_thread():
            return True
        checkout = self.program.checkout
        own = {_PACKAGE, *([checkout.path.resolve()] if checkout is not None else [])}
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            is_command = _COMMAND in (file.stem, file.parent.stem)  # on Windows KOHYA-EXT.exe/__main__.py
            if frame.f_globals.get("__name__") != "runpy" and not is_command and own.isdisjoint(file.resolve().parents):
                return True
            frame = frame.f_back
        return False

    def parse(self, original: Any, settings: Settings) -> Any:
        """Return an ``add_training_arguments`` that also replaces the functions that train in the script that calls it."""

        @wraps(original)
        def add_training_arguments(*args: Any, **kwargs: Any) -> Any:
            self.replace_training_functions(sys._getframe(1))
            return original(*args, **kwargs)

        return add_training_arguments

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

    def backward(self, original: Any, settings: Settings) -> Any:
        """Return an ``Accelerator.backward`` that runs the callbacks before it."""
        loop = self

        @wraps(original)
        def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if loop.run is not None:
                loop.run.before_backward()
            return original(self, *args, **kwargs)

        return backward

    def optimizer_step(self, original: Any, settings: Settings) -> Any:
        """Return an ``AcceleratedOptimizer.step`` that runs the callbacks before a step."""
        loop = self

        @wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if loop.run is not None and self.gradient_state.sync_gradients:
                loop.run.before_optimizer_step()
            return original(self, *args, **kwargs)

        return step

    def iterate(self, original: Any, settings: Settings) -> Any:
        """Return a ``DataLoaderShard.__iter__`` that records the batch and lets callbacks change the training batches."""
        loop = self

        @wraps(original)
        def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
            run = loop.run
            if run is None:
                yield from original(self)
                return
            # The caller of this frame is the training loop, because enumerate() has no frame.
            yield from run.recorded(run.batches(self, partial(original, self), sys._getframe().f_back))

        return __iter__


def current(kind: type[C]) -> C | None:
    """Return the callback of a class in this process's run; None without a run or if its patch has no callback."""
    return _current.callback(kind) if _current is not None else None


def observe(kind: type[C], action: Callable[[C], object]) -> None:
    """Call an action of a callback of a class, if there is one; a failure is handled as in its own methods."""
    if _current is not None and (callback := _current.callback(kind)) is not None:
        _current.guarded(callback, lambda: action(callback), lambda: None)


def begin_without_batches() -> None:
    """Call ``before_training`` of all callbacks, because all steps are trained."""
    if _current is not None:
        _current.before_training()


def validated(evaluation: Any) -> None:
    """Call ``after_validation`` of all callbacks."""
    if _current is not None:
        _current._each("after_validation", evaluation)


def callbacks() -> Sequence[TrainingCallback]:
    """Return the callbacks of this process's run in the order of their stages; empty without a run."""
    return tuple(_current.callbacks) if _current is not None else ()


def program() -> Program:
    """Return the program of this process's run; an empty one without a run."""
    return _current.program if _current is not None else Program()


def unobserved_backward(accelerator: Any, loss: Any) -> None:
    """Call accelerate's own ``backward``, with its scaling, for a loss that is not the step's. No callback or patch sees it."""
    inspect.unwrap(type(accelerator).backward)(accelerator, loss)


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


def _training_functions(module: Any) -> Iterator[tuple[Any, str, FunctionType]]:
    """Yield (owner, name, function) of the functions and methods of a module that create an accelerator and train."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    for owner in (module, *classes):
        for name, value in vars(owner).items():
            if isinstance(value, FunctionType) and "prepare_accelerator" in value.__code__.co_names:
                yield owner, name, value
