"""A backend of torch.compile that never raises: a graph that cannot be compiled runs as it was traced.

The granularity is the graph, not the call: what dynamo has cached stays valid, so that under gradient checkpointing a
recompute runs, and saves, exactly what its forward did. Backward graphs are compiled late, inside ``loss.backward()``,
where nothing can be run again; a broken one is interpreted.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from kohya_ext.compiling.support import DEFAULT_BACKEND

Backend = Callable[[Any, Sequence[Any]], Any]
Kind = Literal["forward", "backward"]


class Observer(Protocol):
    """What is told about the graphs of one compiled method."""

    @property
    def has_failed(self) -> bool:
        """True when nothing more is to be compiled."""

    def compiling(self, kind: Kind) -> AbstractContextManager[None]:
        """Wrap the compilation of one graph."""

    def failed(self, error: Exception) -> None:
        """Hear that one did not succeed."""


def falling_back(backend: str, mode: str | None, observer: Observer) -> Backend:
    """Return torch's backend of that name (``mode`` for inductor only) with a way back to eager.

    Raises torch's ``InvalidBackend`` for a name it does not know.
    """
    from torch._dynamo.exc import RestartAnalysis

    compiler = _inductor(mode, observer) if backend == DEFAULT_BACKEND else _lookup(backend)

    def compile_graph(graph_module: Any, inputs: Sequence[Any]) -> Any:
        if observer.has_failed:
            return graph_module.forward
        spare = _spare(graph_module)
        with observer.compiling("forward"):
            try:
                return compiler(graph_module, inputs)
            except RestartAnalysis:  # no failure: dynamo is asked to trace again
                raise
            except Exception as error:  # whatever a broken compiler throws
                observer.failed(error)
                return spare.forward

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
        spare = _spare(graph_module)
        with observer.compiling("backward"):
            try:
                if observer.has_failed:
                    return _interpreted(spare)
                return compile_fx_inner(graph_module, inputs, **kwargs)
            except Exception as error:
                if _draws_random_numbers(spare):
                    raise  # eager would draw others than the forward graph did: a wrong gradient
                observer.failed(error)
                return _interpreted(spare)

    patches = torch._inductor.list_mode_options(mode) if mode else {}

    def compile_graph(graph_module: Any, inputs: Sequence[Any]) -> Any:
        return compile_fx(graph_module, inputs, inner_compile=compile_inner, config_patches=patches or None)

    return compile_graph


def _spare(graph_module: Any) -> Any:
    """A copy for when compiling, which rewrites the graph in place, has failed half-way. Tensors are shared."""
    from torch.fx import GraphModule

    return GraphModule(graph_module, copy.deepcopy(graph_module.graph))


def _draws_random_numbers(graph_module: Any) -> bool:
    return any(
        "inductor_seed" in str(node.target) or "inductor_random" in str(node.target) for node in graph_module.graph.nodes
    )


def _interpreted(graph_module: Any) -> Any:
    """Return the graph as what AOTAutograd takes for compiled code: called with one list, which it empties."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    try:
        output_code: Any = importlib.import_module("torch._inductor.output_code").OutputCode
    except ImportError:  # torch 2.5 takes any function
        output_code = object

    # The compiled forward graph is free to lay out what it saves otherwise than it was traced; inductor does the same.
    view_to_reshape(graph_module)
    graph_module.recompile()

    class Interpreted(output_code):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._boxed_call = True  # on the instance: what wraps it copies its attributes

        def __call__(self, inputs: list[Any]) -> Any:
            taken = list(inputs)
            inputs.clear()
            return graph_module(*taken)

        def post_compile(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to do."""

        def set_triton_bundle(self, bundle: Any) -> None:
            """Nothing to bundle."""

    return Interpreted()
