"""A torch.compile backend that runs a graph in eager mode if compiling it fails.

It falls back graph by graph, not call by call. Graphs in dynamo's cache stay valid, so that a recompute under gradient
checkpointing runs and saves exactly what its forward did. Backward graphs are compiled inside ``loss.backward()``, where
nothing can be repeated, so a graph that fails to compile there is interpreted.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol

from kohya_ext.compiling.support import DEFAULT_BACKEND

Backend = Callable[[Any, Sequence[Any]], Any]
Kind = Literal["forward", "backward"]


class Observer(Protocol):
    """Receives the events of one compiled method's graphs."""

    @property
    def has_failed(self) -> bool:
        """Whether compiling has failed and further graphs run eager."""

    def compiling(self, kind: Kind) -> AbstractContextManager[None]:
        """Return a context manager around the compilation of one graph."""

    def limit(self, compiler: Callable[[], Any]) -> Any:
        """Return what ``compiler`` returns, unless it takes too long."""

    def failed(self, error: Exception) -> None:
        """Record that compiling a graph failed."""


def with_fallback(backend: str, mode: str | None, observer: Observer) -> Backend:
    """Return torch's backend of that name (``mode`` for inductor only) with a way back to eager.

    Raises torch's ``InvalidBackend`` for a name it does not know.
    """
    from torch._dynamo.exc import RestartAnalysis

    compiler = _inductor(mode, observer) if backend == DEFAULT_BACKEND else _lookup(backend)

    def compile_graph(graph_module: Any, inputs: Sequence[Any]) -> Any:
        if observer.has_failed:
            return graph_module.forward
        copied = _copy_graph(graph_module)
        with observer.compiling("forward"):
            try:
                return observer.limit(partial(compiler, graph_module, inputs))
            except RestartAnalysis:  # not a failure: asks dynamo to trace again
                raise
            except Exception as error:  # a broken compiler can raise anything
                observer.failed(error)
                return copied.forward

    return compile_graph


def _lookup(name: str) -> Backend:
    from torch._dynamo.backends.registry import lookup_backend

    backend: Backend = lookup_backend(name)
    return backend


def _inductor(mode: str | None, observer: Observer) -> Backend:
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_inner(graph_module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_fx_inner(graph_module, inputs, **kwargs)
        copied = _copy_graph(graph_module)
        with observer.compiling("backward"):
            try:
                if observer.has_failed:
                    return _interpreter(copied)
                return observer.limit(partial(compile_fx_inner, graph_module, inputs, **kwargs))
            except Exception as error:
                if _draws_random_numbers(copied):
                    raise  # eager would draw different random numbers than forward did and give a wrong gradient
                observer.failed(error)
                return _interpreter(copied)

    patches = torch._inductor.list_mode_options(mode) if mode else {}

    def compile_graph(graph_module: Any, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph_module, inputs, inner_compile=compile_inner, config_patches=patches or None)

    return compile_graph


def _copy_graph(graph_module: Any) -> Any:
    """Return a copy of the graph that shares its tensors. A failed compilation leaves the original half rewritten."""
    from torch.fx import GraphModule

    return GraphModule(graph_module, copy.deepcopy(graph_module.graph))


def _draws_random_numbers(graph_module: Any) -> bool:
    return any(
        "inductor_seed" in str(node.target) or "inductor_random" in str(node.target) for node in graph_module.graph.nodes
    )


def _interpreter(graph_module: Any) -> Any:
    """Return a callable that AOTAutograd accepts as compiled code. It takes one list of inputs, and empties it."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    try:
        output_code: Any = importlib.import_module("torch._inductor.output_code").OutputCode
    except ImportError:  # torch 2.5 accepts any function
        output_code = object

    # The compiled forward may save tensors in other layouts than the traced ones. Inductor makes the same change.
    view_to_reshape(graph_module)
    graph_module.recompile()

    class Interpreted(output_code):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._boxed_call = True  # set on the instance, because wrappers copy its attributes

        def __call__(self, inputs: list[Any]) -> Any:
            taken = list(inputs)
            inputs.clear()
            return graph_module(*taken)

        def post_compile(self, *args: Any, **kwargs: Any) -> None:
            """Do nothing."""

        def set_triton_bundle(self, bundle: Any) -> None:
            """Do nothing."""

    return Interpreted()
