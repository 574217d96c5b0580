"""An 8-bit base on fake tensors: the memory and the work of its kernels, eager and compiled, and of its conversion."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kohya_ext.errors import UserError
from kohya_ext.estimate import eight_bits
from kohya_ext.estimate.compiled import BACKEND, logging_to, traceable
from kohya_ext.estimate.events import Kind
from kohya_ext.estimate.gpus import FP8, INT8
from kohya_ext.estimate.seconds import MEMORY, ROTATION, Work
from kohya_ext.estimate.step import fake_tensors
from kohya_ext.estimate.tracker import BACKWARD, Tracker
from kohya_ext.estimate.triton_kernels import counted_kernels
from kohya_ext.estimate.work import Counter
from kohya_ext.quantization import rotation
from kohya_ext.quantization.linear import KINDS, Linear, convert

pytest.importorskip("triton")

ROWS, INPUTS, OUTPUTS = 32, 640, 1280


def layer(precision: str) -> torch.nn.Linear:
    linear = torch.nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16).requires_grad_(False)
    convert(linear, KINDS[precision], "kernels", linear.weight.device)
    return linear


def logged(precision: str, compiled: bool) -> tuple[list[int], Work]:
    """Return the bytes of a layer's allocations in forward and backward, sorted, and its work."""
    mode, tracker = traceable(), Tracker()
    with fake_tensors(mode), counted_kernels(eight_bits=True), logging_to(mode, tracker):
        base = layer(precision)
        function: Any = torch.compile(base, backend=BACKEND) if compiled else base
        x = torch.zeros(ROWS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.zeros(ROWS, OUTPUTS, dtype=torch.bfloat16)
        function(x).backward(gradient)  # compiles
        x.grad = None
        tracker.forget()
        with tracker:
            tracker.mark([x, gradient, *base.parameters(), *base.buffers()], Kind.WEIGHT)
            start = len(tracker.events)
            tracker.work = Counter()
            y = function(x)
            with tracker.during(BACKWARD):
                y.backward(gradient)
        sizes = [event.bytes for event in tracker.events[start:] if event.bytes > 0]
        work = tracker.work.work()
    return sorted(sizes), work


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_is_that_of_the_kernels_results(compiled: bool) -> None:
    """8-bit rows and a scale per row in each pass, the output, the transposed weight and the gradient."""
    sizes, _ = logged("int8", compiled)
    forward = [ROWS * INPUTS, 4 * ROWS, 2 * ROWS * OUTPUTS]
    assert sizes == sorted([*forward, ROWS * OUTPUTS, 4 * ROWS, INPUTS * OUTPUTS, 2 * ROWS * INPUTS])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("precision", "kind"), [("int8", INT8), ("fp8", FP8)])
def test_work_is_that_of_the_kernels(precision: str, kind: str, compiled: bool) -> None:
    _, work = logged(precision, compiled)
    products = [group for group in work.batch if group.kind == kind]
    assert sum(group.count for group in products) == 2
    assert sum(group.flops for group in products) == 2 * 2 * ROWS * INPUTS * OUTPUTS
    quantized = ROWS * (2 * INPUTS + INPUTS + 4 + 2 * OUTPUTS + OUTPUTS + 4) + 4 * OUTPUTS
    transposed = 2 * INPUTS * OUTPUTS
    assert sum(group.bytes for group in work.batch if group.kind == MEMORY) == pytest.approx(quantized + transposed, rel=0.01)
    rotations = sum(group.flops for group in work.batch if group.kind == ROTATION)
    padded = 16 * rotation.BLOCK  # ten blocks of a row in a tile of sixteen
    assert rotations == (2 * rotation.BLOCK * ROWS * (padded + INPUTS) if precision == "int8" else 0)


def test_compiled_layer_has_one_graph_per_pass() -> None:
    _, eager = logged("int8", compiled=False)
    _, compiled = logged("int8", compiled=True)
    assert eager == compiled


def test_conversion_leaves_nothing_on_the_gpu() -> None:
    """The peak is that of the largest part: its copy, or three tensors of its size in fp32."""
    tracker = Tracker()
    with fake_tensors(), counted_kernels(eight_bits=True):  # not to leave fake matrices
        model = torch.nn.Sequential(layer("int8"), torch.nn.Linear(8, 8))
        with tracker:
            eight_bits.log_conversion(model, torch.bfloat16, tracker)
        alive = peak = 0
        for event in tracker.events:
            alive += event.bytes
            peak = max(peak, alive)
    workspaces = sum(tensor.nbytes for tensor in tracker.workspaces.values())
    assert alive == workspaces
    assert 12 * INPUTS * OUTPUTS <= peak - alive <= 13.1 * INPUTS * OUTPUTS
    assert isinstance(model[0], Linear)


def test_an_estimate_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kohya_ext.estimate.triton_kernels.missing_triton", lambda: "Triton is not installed")
    with (
        pytest.raises(UserError, match="an 8-bit base cannot be estimated: Triton is not installed"),
        counted_kernels(eight_bits=True),
    ):
        pass
