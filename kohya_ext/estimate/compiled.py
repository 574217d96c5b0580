"""Compiled blocks on tensors without data: torch's own tracing and partitioning, and no code.

Dynamo traces the blocks as ``--selective_torch_compile`` compiles them; inductor's front half decomposes each graph and
divides it in two, by the activation memory budget. What it would then make kernels of is run operator by operator instead, and
only what those kernels write to memory is weighed:

- A product, a convolution, attention: each is a kernel of its own, and its result a tensor.
- Everything else is fused (the partitioner's own list). A result is a tensor only where a kernel of the first kind, or the
  outside, reads it, or where it would be made again too often; what it is made from lies there until then, and gives it its
  place.
- Convolutions want their channels last: what is not so is copied, and what is kept for backward is the copy.

What is kept for backward is thereby exact. In between it is an approximation: inductor's scheduler may order and fuse
otherwise.
"""

from __future__ import annotations

import atexit
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kohya_ext.console import silent
from kohya_ext.estimate.events import Kind
from kohya_ext.estimate.tracker import BACKWARD, Tracker
from kohya_ext.patching.attributes import replaced

#: The backend's name for torch.compile.
BACKEND = "kohya_ext_estimate"

#: What is made from more than so many tensors is written, rather than made again by each of its readers: inductor's
#: ``realize_acc_reads_threshold`` on a GPU.
MOST_READ = 8


@contextmanager
def registered(name: str, backend: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
    """Have a backend of torch.compile inside the block, which says nothing, and nothing that was compiled before or stays."""
    from torch._dynamo.backends import registry

    from kohya_ext.compiling.blocks import RUN

    torch._dynamo.reset()
    registry.register_backend(backend, name)
    try:
        with silent():
            yield
    finally:
        del registry._BACKENDS[name], registry._COMPILER_FNS[name]
        torch._dynamo.reset()
        atexit.unregister(RUN.summarize)


def traceable() -> FakeTensorMode:
    """Return a mode of tensors without data with what dynamo wants to find in it: an environment of shapes, to guard them."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@contextmanager
def one_mode(mode: Any) -> Iterator[None]:
    """Let AOTAutograd trace in the mode that the tensors are of: before torch 2.7 or so dynamo has one of its own."""
    from torch._guards import TracingContext

    with replaced(TracingContext.get(), "fake_mode", mode):
        yield


@contextmanager
def weighing(mode: Any, tracker: Tracker) -> Iterator[None]:
    """Have the backend inside the block: blocks that it compiles log to ``tracker`` what their kernels write."""
    from torch._inductor.compile_fx import compile_fx

    def inner(graph_module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return _boxed(_Half(graph_module, tracker, bool(kwargs.get("is_backward"))))

    def compile_graph(traced: Any, inputs: Sequence[Any]) -> Any:
        with one_mode(mode):
            return compile_fx(traced, inputs, inner_compile=inner)

    with registered(BACKEND, compile_graph):
        yield


class _Half:
    """The forward or the backward half of a graph: runs it, and logs what inductor's kernels would allocate."""

    def __init__(self, graph_module: Any, tracker: Tracker, is_backward: bool) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.interpreter = torch.fx.Interpreter(graph_module, garbage_collect_values=False)
        self.tracker, self.is_backward = tracker, is_backward
        self.written = _written(self.nodes)
        self.turned = set() if is_backward else _kept_for_convolutions(self.nodes)
        self.dying: dict[Any, list[Any]] = {}
        """Node -> what it reads last."""
        last_user = {used: node for node in self.nodes for used in node.all_input_nodes}
        for node, last in last_user.items():
            self.dying.setdefault(last, []).append(node)

    def __call__(self, inputs: list[Any]) -> Any:
        interpreter, tracker = self.interpreter, self.tracker
        interpreter.args_iter = iter([*inputs])
        inputs.clear()
        env: dict[Any, Any] = {}
        interpreter.env = env
        again = tracker.phase == BACKWARD and not self.is_backward
        kind = Kind.RECOMPUTED if again else Kind.TEMPORARY
        sources: dict[Any, list[Any]] = {}
        """Node -> what a result that is not in memory will be made from."""
        with tracker.looking_away():
            for node in self.nodes:
                if node.op == "output":
                    made = interpreter.run_node(node)
                    interpreter.env, interpreter.args_iter = {}, iter(())  # it outlives the call, what it holds must not
                    return made
                copies = [_turned(env[used]) for used in node.all_input_nodes if _is_to_be_turned(node, used, env[used])]
                tracker.see(copies, kind)
                made = env[node] = interpreter.run_node(node)
                if node in self.turned:
                    made = env[node] = _turned(made)
                    tracker.see(made, kind)
                if node in self.written and not _is_fused(node):
                    tracker.see(made, kind)
                elif node not in self.written and node.op == "call_function":
                    sources[node] = [part for used in node.all_input_nodes for part in (env[used], *sources.get(used, ()))]
                for used in self.dying.get(node, ()):
                    env.pop(used)
                    sources.pop(used, None)
                if node in self.written and _is_fused(node):
                    tracker.see(made, kind)
                del made, copies
        raise AssertionError("a graph without an output")


def _written(nodes: Sequence[Any]) -> set[Any]:
    """The nodes whose results are in memory: a kernel's own; what one reads, or the outside; what is made from too much.

    What a view of a result needs is written when that is made.
    """
    from torch._inductor import config

    written = set()
    reads: dict[Any, frozenset[Any]] = {}
    """Node -> what is read for it from memory."""
    for node in nodes:
        if node.op != "call_function":
            reads[node] = frozenset((node,))
            continue
        reads[node] = frozenset().union(*(reads[used] for used in node.all_input_nodes))
        outside = any(user.op == "output" or not _is_fused(user) for user in node.users)
        often = len(node.users) > 1 and len(reads[node]) > config.realize_reads_threshold
        if not _is_fused(node) or outside or often or len(reads[node]) > MOST_READ:
            written.add(node)
            reads[node] = frozenset((node,))
    return written


def _kept_for_convolutions(nodes: Sequence[Any]) -> set[Any]:
    """The inputs that are kept for backward and lead to a convolution: inductor keeps a copy, with channels last.

    Of an SDXL LoRA's 6.44 GB at 1024x1024 they are 0.62, which whoever asks the partitioner alone does not see.
    """
    leading: set[Any] = set()
    for node in reversed(nodes):
        if node.target is torch.ops.aten.convolution.default or leading.intersection(node.users):
            leading.add(node)
    kept = nodes[-1].all_input_nodes
    return {node for node in leading.intersection(kept) if node.op == "placeholder" and _is_picture(node.meta.get("val"))}


def _is_to_be_turned(node: Any, used: Any, given: Any) -> bool:
    """Whether a convolution is given, from outside, what does not have its channels last: it gets a copy.

    What forward kept for backward does have them.
    """
    if node.target is torch.ops.aten.convolution_backward.default:
        return "tangents" in used.name and _is_picture(given)
    return node.target is torch.ops.aten.convolution.default and used.op == "placeholder" and _is_picture(given)


def _is_picture(given: Any) -> bool:
    """Whether a tensor has two spatial dimensions that differ in memory from channels last."""
    return isinstance(given, torch.Tensor) and given.dim() == 4 and not given.is_contiguous(memory_format=torch.channels_last)


def _turned(given: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(given, memory_format=torch.channels_last)


def _is_fused(node: Any) -> bool:
    return node.op == "call_function" and bool(_operators().is_fusible(node))


@functools.cache
def _operators() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def _boxed(run: Callable[[list[Any]], Any]) -> Any:
    """Return a function as inductor's own compiled code is: called with one list, which it empties."""
    try:
        output_code: Any = importlib.import_module("torch._inductor.output_code").OutputCode
    except ImportError:  # torch 2.5 takes any function
        output_code = object

    class Boxed(output_code):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._boxed_call = True  # on the instance: what wraps it copies its attributes

        def __call__(self, inputs: list[Any]) -> Any:
            return run(inputs)

        def post_compile(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to do."""

        def set_triton_bundle(self, bundle: Any) -> None:
            """Nothing to bundle."""

    return Boxed()
