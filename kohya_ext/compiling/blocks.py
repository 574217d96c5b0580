"""Compiled methods of a model's repeated blocks, with their counters and messages."""

from __future__ import annotations

import atexit
import gc
import importlib
import inspect
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kohya_ext.compiling.configuration import RECOMPILE_LIMIT, keep_compiled_code, prepare_torch
from kohya_ext.compiling.deadline import Result, call_until, end_compile_workers
from kohya_ext.compiling.fallback import Kind, with_fallback
from kohya_ext.compiling.inputs import Inputs, has_several_sizes, mark_sizes, named_arguments, require_gradients
from kohya_ext.compiling.support import DEFAULT_BACKEND, find_obstacle
from kohya_ext.config.settings import Settings
from kohya_ext.console import note, warn
from kohya_ext.patching.types import DataSet


class CompilingError(Exception):
    """The reason why an attempt to compile blocks was given up."""


@dataclass
class Attempt:
    """A first compilation, which is given up instead of leaving blocks eager, and when it takes too long."""

    seconds: float
    """The most seconds of the compilation."""
    kinds: int
    """How many kinds of blocks there are."""
    clock: Callable[[], float] = time.monotonic
    problem: str | None = None
    """Why it was given up; None if it was not. The error can come from inside torch, in another form."""
    is_in_time: bool = True
    """Whether it was not given up for lack of time."""
    _begun: float = field(init=False)
    _compiled: int = 0
    _is_limited: bool = False

    def __post_init__(self) -> None:
        self._begun = self.clock()

    def go_on(self) -> None:
        """Raise CompilingError after the most seconds, and if the attempt was given up."""
        if self.problem is None and self.clock() - self._begun > self.seconds:
            self._took_too_long()
        if self.problem is not None:
            raise CompilingError(self.problem)

    def limit(self, compiler: Callable[[], Result]) -> Result:
        """Return what ``compiler`` returns. Raises CompilingError after the most seconds; a compiler can call others."""
        left = self.seconds - (self.clock() - self._begun)
        if self._is_limited or left == math.inf:
            return compiler()
        self._is_limited = True
        try:
            return call_until(left, CompilingError, self._took_too_long, compiler)
        finally:
            self._is_limited = False

    def give_up(self, problem: str) -> None:
        """Raise CompilingError."""
        self.problem = self.problem or problem
        raise CompilingError(self.problem)

    def compiled_kind(self) -> None:
        """Notice that both passes of a kind of block were compiled. Raises CompilingError if the others will take too long."""
        self._compiled += 1
        self.go_on()
        expected = (self.clock() - self._begun) / self._compiled * self.kinds
        if expected > self.seconds:
            self._lacks_time(f"compiling takes about {expected:.0f} s, and this run allows {self.seconds:.0f} s")
            self.go_on()

    def _took_too_long(self) -> None:
        self._lacks_time(f"compiling took longer than the {self.seconds:.0f} s that this run allows")

    def _lacks_time(self, problem: str) -> None:
        self.is_in_time = False
        self.problem = f"{problem}; a longer run allows more, and --selective_torch_compile any time"


#: Seconds between two progress lines of one class. SDXL compiles more than a dozen graphs in its first step.
PROGRESS_INTERVAL = 10.0


@dataclass
class Run:
    """State shared by all compiled methods of this process."""

    blocks: dict[str, Block] = field(default_factory=dict)
    disabled_because: str | None = None
    """Why nothing is compiled in this run; None if blocks are compiled."""
    paused: bool = False
    """Whether the blocks run eager for now, because another patch measures them first."""
    data_sets: Callable[[], Sequence[DataSet]] = tuple
    """Return sd-scripts' datasets of the run; empty until the script has created them."""
    commit: str | None = None
    """The commit of sd-scripts, whose code is compiled."""
    backend: str = DEFAULT_BACKEND
    """The name of torch.compile's backend for the blocks. Estimates have one of their own."""
    attempt: Attempt | None = None
    """The attempt that is under way; None if compiling may take any time, and a block that fails runs eager."""
    prepared: bool = False
    several_sizes: bool = False
    """Whether the datasets have images of several sizes. Set before the first compilation."""
    _breaks_before: int = 0

    def begin(self, data_sets: Callable[[], Sequence[DataSet]], commit: str | None) -> None:
        """Reset everything for a new training run."""
        self.data_sets, self.commit = data_sets, commit
        self.disabled_because, self.paused, self.prepared, self.several_sizes = None, False, False, False
        self.attempt = None

    def prepare(self, device: str) -> None:
        """Set up torch before the first compilation of a run. Repeated calls do nothing."""
        if not self.prepared:
            self.prepared = True
            keep_compiled_code(device, self.commit)
            prepare_torch()
            self.several_sizes = has_several_sizes(self.data_sets())
            self._breaks_before = _graph_breaks()
            atexit.unregister(self.summarize)
            atexit.register(self.summarize)

    def disable(self, reason: str) -> None:
        """Run every block eager and warn with the reason."""
        if self.attempt is not None:
            self.attempt.give_up(reason)
        self.disabled_because = reason
        warn(f"selective compile is off: {reason}")

    @contextmanager
    def attempting(
        self, device: str, seconds: float, kinds: int, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[Attempt]:
        """Compile within an attempt inside the block."""
        self.prepare(device)
        importlib.import_module("torch._inductor.compile_fx")  # its seconds say nothing about those of other blocks
        self.attempt = attempt = Attempt(seconds, kinds, clock)
        try:
            yield attempt
        finally:
            self.attempt = None

    def forget(self) -> None:
        """Drop all compiled code, and end the processes that compile."""
        if not any(block.compiled for block in self.blocks.values()):
            return
        import torch

        for block in self.blocks.values():
            block.forget()
        torch._dynamo.reset()
        # Later versions keep them for a second model.
        end_compile_workers()
        gc.collect()  # the compiler's errors hold tensors

    def has(self, module: Any) -> bool:
        """Return whether a module is a block."""
        name = f"{type(module).__module__}:{type(module).__name__}"
        return any(label.rpartition(".")[0] == name for label in self.blocks)

    @property
    def seconds(self) -> float:
        """The seconds of all compilations."""
        return sum(block.seconds for block in self.blocks.values())

    @property
    def breaks(self) -> int:
        """The number of graph breaks since the first compilation."""
        return _graph_breaks() - self._breaks_before if self.prepared else 0

    def facts(self) -> dict[str, Any]:
        """Return the report's entry: graph breaks, and counts and seconds by class."""
        return {
            "disabled_because": self.disabled_because,
            "graph_breaks": self.breaks,
            "blocks": {block.label: block.facts() for block in self.blocks.values() if block.calls},
        }

    def summarize(self) -> None:
        """Print one line about all compilations of the run."""
        used = [block for block in self.blocks.values() if block.graphs]
        if not used:
            return
        graphs = sum(block.graphs for block in used)
        counts = "; ".join(f"{block.name} {block.graphs}" for block in used)
        recompiles = sum(block.recompiles for block in used)
        note(
            f"selective compile: {graphs} graphs ({counts}), {recompiles} of them recompiles, in {self.seconds:.0f} s; "
            f"{self.breaks} graph breaks"
        )
        for block in used:
            if block.graphs >= RECOMPILE_LIMIT:
                warn(
                    f"{block.name} reached the limit of {RECOMPILE_LIMIT} graphs; further shapes run eager. "
                    f"Add --compile_dynamic true for one graph for all image sizes"
                )


RUN = Run()


@dataclass
class Block:
    """A class whose method is compiled. Counts cover the whole run."""

    label: str
    """``module:Class.method``."""
    position: str
    """Position among the classes of its model: ``1 of 4``."""
    settings: Settings
    original: Callable[..., Any]
    inputs: Inputs = field(default_factory=Inputs)
    parameters: tuple[str, ...] = ()
    """Parameter names of the method, in order, without ``self``."""
    compiled: Callable[..., Any] | None = None
    calls: int = 0
    """Calls of compiled code, including recomputes."""
    graphs: int = 0
    """Compiled forward graphs: one per variant of the class and, until dynamo treats a size as dynamic, one per shape."""
    backward_graphs: int = 0
    last_graph_at_call: int = 0
    seconds: float = 0.0
    """Time of the calls that compiled a graph, including tracing and the first run of the compiled code."""
    eager_because: str | None = None
    """Why no further graph is compiled for this class; set once."""
    eager: bool = False
    """Whether calls go directly to the original method, bypassing dynamo."""
    _reported_at: float = 0.0
    _timing: threading.local = field(default_factory=threading.local)

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.label.rpartition(":")[2].partition(".")[0]

    @property
    def recompiles(self) -> int:
        """The number of graphs after the first: other variants of the class, other shapes."""
        return max(self.graphs - 1, 0)

    def facts(self) -> dict[str, Any]:
        """Return this class's entry in the report."""
        return {
            "calls": self.calls,
            "graphs": self.graphs,
            "recompiles": self.recompiles,
            "backward_graphs": self.backward_graphs,
            "last_graph_at_call": self.last_graph_at_call,
            "seconds": round(self.seconds, 3),
            "eager_because": self.eager_because,
        }

    def forget(self) -> None:
        """Drop the compiled code and its counts."""
        self.compiled = self.eager_because = None
        self.calls = self.graphs = self.backward_graphs = self.last_graph_at_call = 0
        self.seconds, self.eager = 0.0, False

    # --- fallback.Observer ---

    @property
    def has_failed(self) -> bool:
        """Whether compiling this class has failed."""
        return self.eager_because is not None

    @contextmanager
    def compiling(self, kind: Kind) -> Iterator[None]:
        """Count and time the compilation of a graph, and print progress from time to time."""
        if RUN.attempt is not None:
            RUN.attempt.go_on()
        with self.timed():
            if kind == "backward":
                self.backward_graphs += 1
            else:
                self.graphs += 1
                self.last_graph_at_call = self.calls
                self._report_progress()
            yield

    def limit(self, compiler: Callable[[], Result]) -> Result:
        """Return what ``compiler`` returns, within the seconds of an attempt."""
        return compiler() if RUN.attempt is None else RUN.attempt.limit(compiler)

    def _report_progress(self) -> None:
        if RUN.attempt is not None:
            return
        now = time.monotonic()
        if self.graphs == 1:
            note(f"compiling {self.name} ({self.position} block classes); the first steps take longer")
        elif now - self._reported_at > PROGRESS_INTERVAL:
            note(f"compiling {self.name} ({self.position} block classes): graph {self.graphs}, {self.seconds:.0f} s so far")
        else:
            return
        self._reported_at = now

    def failed(self, error: Exception) -> None:
        """Stop compiling the class, and warn with the reason once."""
        if self.eager_because is None:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            if RUN.attempt is not None:
                RUN.attempt.give_up(f"{self.name} could not be compiled: {reason}")
            self.eager_because = reason
            warn(f"{self.name} could not be compiled and runs eager: {self.eager_because}")

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the elapsed time to ``seconds`` if a graph was compiled. Nested calls count once, in the outermost."""
        if getattr(self._timing, "on", False):
            yield
            return
        self._timing.on = True
        before, start = self.graphs + self.backward_graphs, time.perf_counter()
        try:
            yield
        finally:
            self._timing.on = False
            if self.graphs + self.backward_graphs != before:
                self.seconds += time.perf_counter() - start


def compile_method(
    original: Callable[..., Any],
    label: str,
    position: str,
    settings: Settings,
    inputs: Inputs | None = None,
    works: Callable[[], bool] = lambda: True,
) -> Callable[..., Any]:
    """Return a method that compiles ``original`` for all instances of its class when it is first called with gradients.

    Calls without gradients (sampling and validation, with other shapes and few calls) run the original, as do calls inside
    another compilation, and all while ``works`` returns False. If compiling fails, training continues in eager mode: see
    `fallback`.
    """
    import torch

    parameters = tuple(name for name in inspect.signature(original).parameters if name != "self")
    block = RUN.blocks[label] = Block(label, position, settings, original, inputs or Inputs(), parameters)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if block.eager or RUN.paused or RUN.disabled_because or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        if not works():
            return original(self, *args, **kwargs)
        if block.compiled is None and not _start(block, [*args, *kwargs.values()]):
            return original(self, *args, **kwargs)
        return _call(block, self, args, kwargs)

    return method


def _start(block: Block, arguments: Sequence[Any]) -> bool:
    import torch

    settings = block.settings
    device = next((argument.device.type for argument in arguments if isinstance(argument, torch.Tensor)), "cpu")
    try:
        obstacle = find_obstacle(device, RUN.backend)
        if obstacle is not None:
            RUN.disable(obstacle)
            return False
        RUN.prepare(device)
        block.compiled = torch.compile(
            block.original,
            backend=with_fallback(RUN.backend, settings["compile_mode"], block),
            dynamic={"auto": None, "true": True, "false": False}[settings["compile_dynamic"]],
        )
    except CompilingError:
        raise
    except Exception as error:  # torch's internals differ between versions; train in eager mode instead
        block.failed(error)
        block.eager = True
        return False
    return True


def _call(block: Block, instance: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    assert block.compiled is not None
    block.calls += 1
    args, kwargs = _unified_arguments(block, instance, args, kwargs)
    with block.timed():
        try:
            return block.compiled(instance, *args, **kwargs)
        except TorchDynamoException as error:
            # Tracing failed. Nothing has run yet.
            block.failed(error)
    # If an earlier call was compiled, its recompute must run the same code. Bypass dynamo only for a class without graphs.
    block.eager = block.graphs == 0
    return block.original(instance, *args, **kwargs)


def _unified_arguments(
    block: Block, instance: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return a call's arguments, changed so that one graph serves calls that would otherwise need two."""
    names = block.parameters
    arguments = named_arguments(names, args, kwargs)
    replaced = require_gradients(block.inputs, instance, arguments)
    if replaced:
        args = [replaced.get(name, value) for name, value in zip(names, args, strict=False)]
        kwargs = {name: replaced.get(name, value) for name, value in kwargs.items()}
        arguments |= replaced
    if RUN.several_sizes and block.settings["compile_dynamic"] == "auto":
        mark_sizes(block.inputs, arguments)
    return args, kwargs


def _graph_breaks() -> int:
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())
