"""A method of a model's repeated blocks, compiled on its class; what is counted about it and what is said."""

from __future__ import annotations

import atexit
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kohya_ext.compiling.configuration import keep_compiled_code, prepare_torch
from kohya_ext.compiling.fallback import Kind, falling_back
from kohya_ext.compiling.inputs import Inputs, arguments_of, has_several_sizes, mark_sizes, with_gradients
from kohya_ext.compiling.support import find_obstacle
from kohya_ext.config.settings import Settings
from kohya_ext.console import note, warn

#: Between two progress lines of one class, seconds: SDXL compiles more than a dozen graphs in its first step.
QUIET_SECONDS = 10.0


@dataclass
class Run:
    """What all compiled methods of this process share."""

    blocks: dict[str, Block] = field(default_factory=dict)
    standing_aside: str | None = None
    """Why nothing is compiled in this run, when something else of the run does it."""
    waiting: bool = False
    """Whether the blocks still run eager because something of the run measures them first."""
    data_sets: Callable[[], Sequence[Any]] = tuple
    """sd-scripts' data sets of the run, once it has made them."""
    commit: str | None = None
    """That of sd-scripts, whose code is compiled."""
    prepared: bool = False
    several_sizes: bool = False
    """Whether the data sets have pictures of several sizes, by the time of the first compilation."""
    _breaks_before: int = 0

    def begin(self, data_sets: Callable[[], Sequence[Any]], commit: str | None) -> None:
        """Start a training run: nothing else is known of it yet."""
        self.data_sets, self.commit = data_sets, commit
        self.standing_aside, self.waiting, self.prepared, self.several_sizes = None, False, False, False

    def prepare(self, settings: Settings, device: str) -> None:
        """Set up torch before the first compilation of a run. Safe to repeat."""
        if not self.prepared:
            self.prepared = True
            keep_compiled_code(device, self.commit)
            prepare_torch(settings["compile_cache_size_limit"])
            self.several_sizes = has_several_sizes(self.data_sets())
            self._breaks_before = _graph_breaks()
            atexit.unregister(self.summarize)
            atexit.register(self.summarize)

    def stand_aside(self, reason: str) -> None:
        """Leave every block eager, and say why."""
        self.standing_aside = reason
        warn(f"selective compile is off: {reason}")

    @property
    def breaks(self) -> int:
        """Graph breaks since the first compilation: places where a block falls apart into several graphs."""
        return _graph_breaks() - self._breaks_before if self.prepared else 0

    def facts(self) -> dict[str, Any]:
        """For the report: counts by class, seconds of compiling."""
        return {
            "standing_aside": self.standing_aside,
            "graph_breaks": self.breaks,
            "blocks": {block.label: block.facts() for block in self.blocks.values() if block.calls},
        }

    def summarize(self) -> None:
        """Say in one line what compiling came to."""
        used = [block for block in self.blocks.values() if block.graphs]
        if not used:
            return
        graphs, seconds = sum(block.graphs for block in used), sum(block.seconds for block in used)
        settled = "; ".join(f"{block.name} {block.graphs}" for block in used)
        recompiles = sum(block.recompiles for block in used)
        note(
            f"selective compile: {graphs} graphs ({settled}), {recompiles} of them recompiles, in {seconds:.0f} s; "
            f"{self.breaks} graph breaks"
        )
        for block in used:
            if block.graphs >= block.limit:
                warn(
                    f"{block.name} reached the limit of {block.limit} graphs, further shapes run eager: "
                    f"raise --compile_cache_size_limit"
                )


RUN = Run()


@dataclass
class Block:
    """One class whose method is compiled. Counts are over the whole run."""

    label: str
    """``module:Class.method``."""
    position: str
    """``1 of 4``: among the classes of its model."""
    settings: Settings
    original: Callable[..., Any]
    inputs: Inputs = field(default_factory=Inputs)
    parameters: tuple[str, ...] = ()
    """Of the method, in order, without ``self``."""
    compiled: Callable[..., Any] | None = None
    calls: int = 0
    """Calls that went to compiled code, recomputes included."""
    graphs: int = 0
    """Forward graphs compiled. One for each variant of the class and, until dynamo takes a size for dynamic, each shape."""
    backward_graphs: int = 0
    last_graph_at_call: int = 0
    seconds: float = 0.0
    """Spent in calls that compiled, the tracing and the first run of the new code included."""
    eager_because: str | None = None
    """Set once: nothing more is compiled for this class."""
    eager: bool = False
    """The original method is called at once, without dynamo."""
    _said_at: float = 0.0
    _timing: threading.local = field(default_factory=threading.local)

    @property
    def name(self) -> str:
        """The class's name."""
        return self.label.rpartition(":")[2].partition(".")[0]

    @property
    def limit(self) -> int:
        """How many graphs dynamo keeps for the method."""
        from kohya_ext.compiling.configuration import DEFAULT_RECOMPILE_LIMIT

        return self.settings["compile_cache_size_limit"] or DEFAULT_RECOMPILE_LIMIT

    @property
    def recompiles(self) -> int:
        """Graphs after the first: other variants of the class, other shapes."""
        return max(self.graphs - 1, 0)

    def facts(self) -> dict[str, Any]:
        """For the report."""
        return {
            "calls": self.calls,
            "graphs": self.graphs,
            "recompiles": self.recompiles,
            "backward_graphs": self.backward_graphs,
            "last_graph_at_call": self.last_graph_at_call,
            "seconds": round(self.seconds, 3),
            "eager_because": self.eager_because,
        }

    # --- what the backend tells (see fallback.Observer) ---

    @property
    def has_failed(self) -> bool:
        """True when nothing more is to be compiled."""
        return self.eager_because is not None

    @contextmanager
    def compiling(self, kind: Kind) -> Iterator[None]:
        """Count one graph, time it, and say so: the first of the class, and then now and again."""
        with self.timed():
            if kind == "backward":
                self.backward_graphs += 1
            else:
                self.graphs += 1
                self.last_graph_at_call = self.calls
                self._say_progress()
            yield

    def _say_progress(self) -> None:
        now = time.monotonic()
        if self.graphs == 1:
            note(f"compiling {self.name} ({self.position} block classes); the first steps take longer")
        elif now - self._said_at > QUIET_SECONDS:
            note(f"compiling {self.name} ({self.position} block classes): graph {self.graphs}, {self.seconds:.0f} s so far")
        else:
            return
        self._said_at = now

    def failed(self, error: Exception) -> None:
        """Give the class up, and say why, once."""
        if self.eager_because is None:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            self.eager_because = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            warn(f"{self.name} could not be compiled and runs eager: {self.eager_because}")

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add to ``seconds`` if a graph was compiled meanwhile; what stands inside another is in that one's time."""
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
    original: Callable[..., Any], label: str, position: str, settings: Settings, inputs: Inputs | None = None
) -> Callable[..., Any]:
    """Return a method that compiles ``original`` when it is first called to train, for all instances of its class.

    The original runs, as it is, without gradients (sampling, validation: other shapes, few calls) and where something
    else already compiles around it. Nothing but speed depends on its being compiled: see `fallback`.
    """
    import torch

    parameters = tuple(name for name in inspect.signature(original).parameters if name != "self")
    block = RUN.blocks[label] = Block(label, position, settings, original, inputs or Inputs(), parameters)

    @wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if block.eager or RUN.waiting or RUN.standing_aside or torch.compiler.is_compiling() or not torch.is_grad_enabled():
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
        obstacle = find_obstacle(device, settings["compile_backend"])
        if obstacle is not None:
            RUN.stand_aside(obstacle)
            return False
        RUN.prepare(settings, device)
        block.compiled = torch.compile(
            block.original,
            backend=falling_back(settings["compile_backend"], settings["compile_mode"], block),
            dynamic={"auto": None, "true": True, "false": False}[settings["compile_dynamic"]],
            fullgraph=settings["compile_fullgraph"],
        )
    except Exception as error:  # torch's internals differ between versions; training goes on without them
        block.failed(error)
        block.eager = True
        return False
    return True


def _call(block: Block, instance: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    from torch._dynamo.exc import TorchDynamoException

    assert block.compiled is not None
    block.calls += 1
    args, kwargs = _made_alike(block, instance, args, kwargs)
    with block.timed():
        try:
            return block.compiled(instance, *args, **kwargs)
        except TorchDynamoException as error:
            # It could not even be traced (or --compile_fullgraph forbids what it met): no graph, nothing has been run.
            block.failed(error)
    # Where an earlier call did compile, its recompute must meet the same code: only a class that never did is let go.
    block.eager = block.graphs == 0
    return block.original(instance, *args, **kwargs)


def _made_alike(
    block: Block, instance: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return a call's arguments as the compiled code is to see them: one graph where there need not be two."""
    names = block.parameters
    arguments = arguments_of(names, args, kwargs)
    replaced = with_gradients(block.inputs, instance, arguments)
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
