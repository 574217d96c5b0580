"""Compiled blocks of a dry run: traced as the CPU's, and logged as inductor's code for a GPU runs (:mod:`inductor`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from kohya_ext.compiling import graph_breaks
from kohya_ext.compiling.blocks import RUN
from kohya_ext.dry_run import activation_budgets, device, inductor
from kohya_ext.dry_run.gpu_tracker import GpuTracker
from kohya_ext.dry_run.tracker import Tracker
from kohya_ext.errors import UserError
from kohya_ext.patching.attributes import replaced


def prepare() -> None:
    """Make Dynamo's table of torch's functions, which must not have one object twice, before any of them is replaced."""
    get_torch_obj_rule_map()


@contextmanager
def compiled_blocks(tracker: Tracker) -> Iterator[Callable[[], None]]:
    """Compile blocks inside the block, for the rest of the process; yield the check of :func:`inductor.logging_to`."""
    _compile_as_the_cpus()
    with inductor.logging_to(tracker, lambda: device.compiled(0)) as check:
        yield lambda: _check(check)


@contextmanager
def budgets_of_blocks(mode: Any) -> Iterator[list[activation_budgets.Graph]]:
    """Trace blocks inside the block, for the rest of the process; yield the list to which their graphs are added."""
    _compile_as_the_cpus()
    with activation_budgets.collecting(mode, lambda: device.compiled(0)) as graphs:
        yield graphs


def _compile_as_the_cpus() -> None:
    compile_function = torch.compile
    _probe_with_data(compile_function)
    torch.compile = lambda function=None, **options: _compiled(compile_function, function, options)
    FakeTensor.device = property(device.device_for_python)
    setattr(GpuTracker, "__torch_dispatch__", torch._disable_dynamo(GpuTracker.__torch_dispatch__))  # noqa: B010


def _probe_with_data(compile_function: Any) -> None:
    """Let the probes for graph breaks trace their examples as in a run: by ``torch.compile`` itself, on tensors with data."""
    breaks_the_graph = graph_breaks.breaks_the_graph

    def breaks(example: Any) -> bool:
        with _disable_current_modes(), replaced(torch, "compile", compile_function):
            return breaks_the_graph(example)

    graph_breaks.breaks_the_graph = breaks


def _check(check: Callable[[], None]) -> None:
    """Raise UserError if a block has run eager, because it could not be traced or compiled."""
    check()
    reason = next((block.eager_because for block in RUN.blocks.values() if block.eager_because), None)
    if reason is not None:
        raise UserError(
            f"compiled blocks cannot be estimated for this run ({reason}); estimate without --selective_torch_compile"
        )


def _compiled(compile_function: Any, function: Any, options: dict[str, Any]) -> Any:
    """Compile a block. What packages compile, with torch's own backends, runs eager."""
    if not callable(options.get("backend")):
        return function if function is not None else lambda decorated: decorated
    traced = compile_function(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_on_gpu, (args, kwargs))
        with device.compiled():
            result = traced(*args, **kwargs)
        for value in device.fake_tensors((result,)):
            value.fake_device = device.GPU
        return result

    return call


def _on_gpu(value: Any) -> Any:
    """Return a copy of a host's tensor on the GPU, as HunyuanImage's blocks make of its tables, and keep, in the first step."""
    is_on_host = isinstance(value, FakeTensor) and value.fake_device.type == "cpu" and value.dim() > 0
    return value.to(device.GPU) if is_on_host else value
