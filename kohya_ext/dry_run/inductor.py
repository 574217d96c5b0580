"""Memory of compiled blocks on fake tensors: inductor's own code, run with kernels that do nothing.

Dynamo traces the blocks as ``--selective_torch_compile`` compiles them, and inductor generates the code that it would run on
an RTX 4090 (:mod:`inductor_gpu`): it partitions, fuses and reorders, and decides which buffers exist, when they
are freed and which are written in place. The code then runs on fake tensors of the CPU. Its Triton kernels are never compiled,
but the memory in which a GPU would time them is logged (:mod:`autotuning`).
"""

from __future__ import annotations

import atexit
import importlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from kohya_ext.console import silent
from kohya_ext.dry_run import inductor_gpu
from kohya_ext.dry_run.autotuning import Timings
from kohya_ext.dry_run.events import Kind
from kohya_ext.dry_run.tracker import BACKWARD, Tracker
from kohya_ext.dry_run.work import Launcher
from kohya_ext.errors import UserError
from kohya_ext.patching.attributes import replaced

#: The backend's name for torch.compile.
BACKEND = "kohya_ext_estimate"

_aten = torch.ops.aten

#: Library calls of the generated code that write to a given buffer -> the operators that they are.
_PRODUCTS = {
    "mm": _aten.mm.default,
    "bmm": _aten.bmm.default,
    "addmm": _aten.addmm.default,
    "bias_addmm": _aten.addmm.default,
    "baddbmm": _aten.baddbmm.default,
    "_scaled_mm": _aten._scaled_mm.default,
}


@contextmanager
def registered_backend(name: str, backend: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
    """Compile blocks with a backend of that name inside the block, with dynamo reset before and after and its messages off."""
    from torch._dynamo.backends import registry

    from kohya_ext.compiling.blocks import RUN

    torch._dynamo.reset()
    registry.register_backend(backend, name)
    try:
        with silent(), replaced(RUN, "backend", name):
            yield
    finally:
        del registry._BACKENDS[name], registry._COMPILER_FNS[name]
        torch._dynamo.reset()
        atexit.unregister(RUN.summarize)


def traceable() -> FakeTensorMode:
    """Return a fake tensor mode that dynamo can trace in: it has the shape environment that guards need."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


@contextmanager
def logging_to(
    tracker: Tracker, on_gpu: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[Callable[[], None]]:
    """Register the backend inside the block: compiled blocks log to ``tracker`` the tensors that their code allocates.

    Graphs are lowered inside of ``on_gpu``, since they have been moved. Yields a function that raises UserError if a block
    could not be compiled, as the end of the block does. It has run eager then, and its log is of no use.
    """
    from torch._inductor import compile_fx as inductor

    improve, compile_inner = inductor._recursive_joint_graph_passes, inductor.compile_fx_inner
    failures: list[Exception] = []
    timings = Timings(tracker, inductor_gpu.CACHE)

    def improve_and_move(lowering: ExitStack, traced: Any, *args: Any, **kwargs: Any) -> Any:
        """Run inductor's passes over forward and backward together, which compute constants, and move the result to the GPU."""
        improved = improve(traced, *args, **kwargs) or traced  # torch 2.6 improves it in place and returns nothing
        lowering.enter_context(on_gpu())
        with _disable_current_modes():
            inductor_gpu.move(improved, TracingContext.get().fake_mode)
        return improved

    def inner(graph_module: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        load = partial(_Code, tracker, timings, bool(kwargs.get("is_backward")))
        given = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
        # The backward pass is compiled when it first runs, after compile_graph() has returned.
        with _recorded(failures), _disable_current_modes(), _generating(load):
            return compile_inner(graph_module, given, **kwargs)

    def compile_graph(traced: Any, inputs: Sequence[Any]) -> Any:
        with _recorded(failures), inductor_gpu.present(), ExitStack() as lowering:
            moving = partial(improve_and_move, lowering)
            with replaced(inductor, "_recursive_joint_graph_passes", moving):
                return inductor.compile_fx(traced, _traced(inputs), inner_compile=inner)

    with registered_backend(BACKEND, compile_graph):
        yield partial(_check, failures)
    _check(failures)


def _traced(inputs: Sequence[Any]) -> list[Any]:
    """Return a graph's inputs as tensors of the mode that it is traced in, with the dimensions that Dynamo made dynamic."""
    context = TracingContext.get()

    def traced(tensor: Any) -> Any:
        dimensions = context.tensor_to_context.get(tensor)
        source = None if dimensions is None else dimensions.tensor_source
        return context.fake_mode.from_tensor(tensor, source=source, symbolic_context=dimensions)

    return [traced(value) if isinstance(value, torch.Tensor) else value for value in inputs]


def _check(failures: Sequence[Exception]) -> None:
    if failures:
        reason = f"{type(failures[0]).__name__}: {failures[0]}".splitlines()[0]
        raise UserError(
            f"compiled blocks cannot be estimated with torch {torch.__version__} ({reason}); "
            "estimate without --selective_torch_compile"
        )


@contextmanager
def _recorded(failures: list[Exception]) -> Iterator[None]:
    """Add an error inside the block to ``failures``. Dynamo would only run the function eager."""
    try:
        yield
    except Exception as error:
        failures.append(error)
        raise


@contextmanager
def _generating(load: Callable[[str], Any]) -> Iterator[None]:
    """Let inductor load its generated code with ``load(source)`` inside the block, and compile no kernels."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    def load_by_key_path(cls: Any, /, key: str, path: str, linemap: Any = None, attrs: Any = None, **_: Any) -> Any:
        code = load(Path(path).read_text(encoding="utf-8"))
        code.__dict__.update(attrs or {})
        code.__file__ = path
        return code

    kernels = importlib.import_module("torch.utils._triton")
    with ExitStack() as stack:
        stack.enter_context(config.patch({"compile_threads": 1, "force_disable_caches": True}))
        # It asks for a GPU's driver.
        stack.enter_context(replaced(kernels, "triton_hash_with_backend", lambda: ""))
        stack.enter_context(inductor_gpu.present())
        stack.enter_context(replaced(PyCodeCache, "load_by_key_path", classmethod(load_by_key_path)))
        stack.enter_context(replaced(AsyncCompile, "triton", lambda _, name, source, *__, **___: _Kernel(name, source)))
        yield


class _Kernel:
    """A kernel of the generated code, which only counts its work."""

    def __init__(self, name: str, source: str) -> None:
        self._name, self._source = name, source
        self._updated = len({*re.findall(r"in_out_ptr\d+", source)})  # its first arguments
        self.timings: Timings | None = None

    def run(self, *values: Any, **_: Any) -> None:
        """Count the tensors as read or written, and those that it updates as both."""
        assert self.timings is not None
        self.timings.before_run(self._name, self._source, values)
        tracker = self.timings.tracker
        tracker.work.kernel(values, values[: self._updated], launcher=Launcher.ENGINE)
        tracker.kernels += 1

    __call__ = run


class _Code(types.ModuleType):
    """The module of the generated code, with its names replaced by functions of fake tensors."""

    def __init__(self, tracker: Tracker, timings: Timings, is_backward: bool, source: str) -> None:
        super().__init__("generated")
        self._tracker, self._is_backward = tracker, is_backward
        names = self.__dict__
        exec(compile(source, "generated", "exec"), names)
        for name, value in [*names.items()]:
            if isinstance(value, _Kernel):
                value.timings = timings
            elif name.startswith("assert_"):
                names[name] = _ignore
        names |= {
            "empty_strided_cuda": self._empty,
            "reinterpret_tensor": self._view,
            "extern_kernels": _Products(tracker, names["extern_kernels"]),
            "get_raw_stream": _ignore,
            "call": partial(self._call, names["call"]),
        }

    def _call(self, call: Callable[[Any], Any], args: Any) -> Any:
        """Run the code. What the forward pass saves is on the GPU, like its results: there it was the CPU's."""
        results = call(args)
        for value in results if self._tracker.device is not None else ():
            if isinstance(value, FakeTensor):
                value.fake_device = self._tracker.device
        return results

    def _empty(self, size: Any, stride: Any, dtype: Any) -> Any:
        tracker = self._tracker
        with tracker.paused():
            result = torch.empty_strided(size, stride, dtype=dtype, device=tracker.device)
        tracker.record(result, Kind.RECOMPUTED if tracker.phase == BACKWARD and not self._is_backward else Kind.TEMPORARY)
        return result

    def _view(self, tensor: Any, size: Any, stride: Any, offset: int = 0) -> Any:
        with self._tracker.paused():
            return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _ignore(*_: Any) -> None:
    pass


class _Products:
    """The library calls of the generated code. Those that write to a given buffer are counted, and write nothing."""

    def __init__(self, tracker: Tracker, calls: Any) -> None:
        self._tracker, self._calls = tracker, calls

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._calls, name)

        def run(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return call(*args, **kwargs)
            with self._tracker.paused():
                if name == "mm_plus_mm":
                    _aten.mm.default(*args[:2])
                    _aten.mm.default(*args[2:])
                elif name in _PRODUCTS:
                    _PRODUCTS[name](*args, **kwargs)
                else:
                    call(*args, out=out, **kwargs)
            return out

        return run
