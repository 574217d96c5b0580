"""Memory of compiled blocks on fake tensors: torch's own tracing and partitioning, without code generation.

Dynamo traces the blocks as ``--selective_torch_compile`` compiles them. Inductor's front end decomposes each graph and splits
it into forward and backward by the activation memory budget. The graphs then run operator by operator, and only the tensors
that inductor's kernels would write are logged:

- A matrix product, a convolution or attention is a separate kernel, and its result a tensor.
- Every other operator is fused (the partitioner's own list). Its result is a tensor only if an unfused kernel or the caller
  reads it, or if recomputing it would read too many tensors. Its sources stay alive until then, and it reuses their memory.
- Convolutions take channels-last input: other inputs are copied, and the copy is saved for backward.

Saved activations are exact. Temporaries are an approximation, since inductor's scheduler may order and fuse differently.
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
from kohya_ext.estimate.work import computes
from kohya_ext.patching.attributes import replaced

#: The backend's name for torch.compile.
BACKEND = "kohya_ext_estimate"

#: A fused result that reads more tensors than this is written to memory: inductor's ``realize_acc_reads_threshold`` on a GPU.
MAX_READS = 8


@contextmanager
def registered_backend(name: str, backend: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
    """Register a backend of torch.compile inside the block, with dynamo reset before and after and its messages off."""
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
    """Return a fake tensor mode that dynamo can trace in: it has the shape environment that guards need."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@contextmanager
def tracing_in(mode: Any) -> Iterator[None]:
    """Trace AOTAutograd in the tensors' own fake mode: dynamo creates another one before about torch 2.7."""
    from torch._guards import TracingContext

    with replaced(TracingContext.get(), "fake_mode", mode):
        yield


@contextmanager
def logging_to(mode: Any, tracker: Tracker) -> Iterator[None]:
    """Register the backend inside the block: compiled blocks log to ``tracker`` the tensors that their kernels would write."""
    from torch._inductor.compile_fx import compile_fx

    def inner(graph_module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        return _boxed(_Half(graph_module, tracker, bool(kwargs.get("is_backward"))))

    def compile_graph(traced: Any, inputs: Sequence[Any]) -> Any:
        with tracing_in(mode):
            return compile_fx(traced, inputs, inner_compile=inner)

    with registered_backend(BACKEND, compile_graph):
        yield


class _Half:
    """Runs the forward or backward half of a graph, and logs the tensors that inductor's kernels would allocate."""

    def __init__(self, graph_module: Any, tracker: Tracker, is_backward: bool) -> None:
        self.nodes = list(graph_module.graph.nodes)
        self.interpreter = torch.fx.Interpreter(graph_module, garbage_collect_values=False)
        self.tracker, self.is_backward = tracker, is_backward
        self.written, reads = _written(self.nodes)
        self.kernels = [[node.meta.get("val") for node in (source, *reads[source])] for source in reads]
        """The tensors that each fused kernel writes and reads."""
        self.copied = set() if is_backward else _kept_for_convolutions(self.nodes)
        self.last_reads: dict[Any, list[Any]] = {}
        """Node -> inputs that no later node reads."""
        last_user = {used: node for node in self.nodes for used in node.all_input_nodes}
        for node, last in last_user.items():
            self.last_reads.setdefault(last, []).append(node)

    def __call__(self, inputs: list[Any]) -> Any:
        interpreter, tracker = self.interpreter, self.tracker
        interpreter.args_iter = iter([*inputs])
        inputs.clear()
        env: dict[Any, Any] = {}
        interpreter.env = env
        recomputing = tracker.phase == BACKWARD and not self.is_backward
        kind = Kind.RECOMPUTED if recomputing else Kind.TEMPORARY
        sources: dict[Any, list[Any]] = {}
        """Node -> inputs of a fused result that is not in memory."""
        for tensors in self.kernels:
            tracker.work.kernel(tensors)
        with tracker.paused():
            for node in self.nodes:
                if node.op == "output":
                    outputs = interpreter.run_node(node)
                    # The interpreter outlives the call; its tensors must not.
                    interpreter.env, interpreter.args_iter = {}, iter(())
                    return outputs
                copies = [_channels_last(env[used]) for used in node.all_input_nodes if _needs_copy(node, used, env[used])]
                tracker.record(copies, kind)
                result = env[node] = interpreter.run_node(node)
                if node in self.copied:
                    result = env[node] = _channels_last(result)
                    tracker.record(result, kind)
                if node in self.written and not _is_fused(node):
                    tracker.record(result, kind)
                elif node not in self.written and node.op == "call_function":
                    sources[node] = [part for used in node.all_input_nodes for part in (env[used], *sources.get(used, ()))]
                for used in self.last_reads.get(node, ()):
                    env.pop(used)
                    sources.pop(used, None)
                if node in self.written and _is_fused(node):
                    tracker.record(result, kind)
                    tracker.kernels += 1
                del result, copies
        raise AssertionError("a graph without an output")


def _written(nodes: Sequence[Any]) -> tuple[set[Any], dict[Any, frozenset[Any]]]:
    """Return the nodes with results in memory, and the nodes that each fused kernel reads.

    The first are unfused kernels, their inputs, outputs, and results that read many tensors. A view's source is written when
    the view is.
    """
    from torch._inductor import config

    written = set()
    kernels: dict[Any, frozenset[Any]] = {}
    reads: dict[Any, frozenset[Any]] = {}
    """Node -> the tensors in memory that it is computed from."""
    for node in nodes:
        if node.op != "call_function":
            reads[node] = frozenset((node,))
            continue
        reads[node] = frozenset().union(*(reads[used] for used in node.all_input_nodes))
        needed = any(user.op == "output" or not _is_fused(user) for user in node.users)
        often = len(node.users) > 1 and len(reads[node]) > config.realize_reads_threshold
        if not _is_fused(node) or needed or often or len(reads[node]) > MAX_READS:
            written.add(node)
            if _is_fused(source := _without_views(node)):
                kernels[source] = reads[node]
            reads[node] = frozenset((node,))
    return written, kernels


def _without_views(node: Any) -> Any:
    """Return the node whose result a chain of views shows; the node itself if it is not a view."""
    while node.op == "call_function" and _is_view(node.target):
        node = node.all_input_nodes[0]
    return node


def _is_view(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and not computes(target)


def _kept_for_convolutions(nodes: Sequence[Any]) -> set[Any]:
    """Return the saved inputs that lead to a convolution: inductor saves a channels-last copy of them.

    They are 0.62 GB of an SDXL LoRA's 6.44 GB at 1024x1024, which the partitioner alone does not show.
    """
    leading: set[Any] = set()
    for node in reversed(nodes):
        if node.target is torch.ops.aten.convolution.default or leading.intersection(node.users):
            leading.add(node)
    kept = nodes[-1].all_input_nodes
    return {
        node for node in leading.intersection(kept) if node.op == "placeholder" and _differs_in_layout(node.meta.get("val"))
    }


def _needs_copy(node: Any, used: Any, given: Any) -> bool:
    """Return whether a convolution's input from outside the graph is not channels-last, so that inductor copies it.

    Tensors saved by forward are channels-last already.
    """
    if node.target is torch.ops.aten.convolution_backward.default:
        return "tangents" in used.name and _differs_in_layout(given)
    return node.target is torch.ops.aten.convolution.default and used.op == "placeholder" and _differs_in_layout(given)


def _differs_in_layout(given: Any) -> bool:
    """Return whether a tensor is 4D and not laid out channels-last."""
    return isinstance(given, torch.Tensor) and given.dim() == 4 and not given.is_contiguous(memory_format=torch.channels_last)


def _channels_last(given: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(given, memory_format=torch.channels_last)


def _is_fused(node: Any) -> bool:
    return node.op == "call_function" and bool(_operators().is_fusible(node))


@functools.cache
def _operators() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def _boxed(run: Callable[[list[Any]], Any]) -> Any:
    """Wrap a function like inductor's compiled code: called with one list, which it empties."""
    try:
        output_code: Any = importlib.import_module("torch._inductor.output_code").OutputCode
    except ImportError:  # torch 2.5 accepts any function
        output_code = object

    class Boxed(output_code):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._boxed_call = True  # on the instance, since wrappers copy its attributes

        def __call__(self, inputs: list[Any]) -> Any:
            return run(inputs)

        def post_compile(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        def set_triton_bundle(self, bundle: Any) -> None:
            """Do nothing."""

    return Boxed()
