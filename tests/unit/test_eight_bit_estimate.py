"""An 8-bit base on fake tensors: the memory and the work of its kernels, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kohya_ext.dry_run.events import Kind
from kohya_ext.dry_run.inductor import BACKEND, logging_to, traceable
from kohya_ext.dry_run.tracker import BACKWARD, Tracker
from kohya_ext.dry_run.triton_kernels import counted_kernels
from kohya_ext.dry_run.work import Counter
from kohya_ext.errors import UserError
from kohya_ext.estimate.gpus import FP8, INT8
from kohya_ext.estimate.seconds import CONVOLUTION, MEMORY, ROTATION, Work
from kohya_ext.quantization import convolution, rotation
from kohya_ext.quantization.linear import KINDS, convert
from tests.fake_tensors import fake_tensors

pytest.importorskip("triton")

ROWS, INPUTS, OUTPUTS = 32, 640, 1280


def layer(precision: str) -> torch.nn.Linear:
    linear = torch.nn.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16).requires_grad_(False)
    convert(linear, KINDS[precision], "kernels", linear.weight.device)
    return linear


def convolution_layer() -> torch.nn.Conv2d:
    layer = torch.nn.Conv2d(INPUTS, OUTPUTS, 3, padding=1, dtype=torch.bfloat16).requires_grad_(False)
    convolution.convert(layer, "kernels", layer.weight.device)
    return layer


def logged(precision: str, compiled: bool) -> tuple[list[int], Work]:
    """Return the bytes of a linear layer's allocations in forward and backward, sorted, and its work."""
    return logged_of(lambda: layer(precision), (ROWS, INPUTS), (ROWS, OUTPUTS), compiled)


def logged_of(
    make: Callable[[], torch.nn.Module], inputs: tuple[int, ...], outputs: tuple[int, ...], compiled: bool
) -> tuple[list[int], Work]:
    mode, tracker = traceable(), Tracker()
    with fake_tensors(mode), counted_kernels(eight_bits=True), logging_to(tracker):
        base = make()
        function: Any = torch.compile(base, backend=BACKEND) if compiled else base
        x = torch.zeros(inputs, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.zeros(outputs, dtype=torch.bfloat16)
        function(x).backward(gradient)  # compiles
        x.grad = None
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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_convolution_has_the_memory_and_work_of_its_kernels(compiled: bool) -> None:
    """Pixels in 8 bits and a scale of each in both passes, the output, the transposed weight and the gradient."""
    pixels = 4 * 8
    sizes, work = logged_of(convolution_layer, (1, INPUTS, 4, 8), (1, OUTPUTS, 4, 8), compiled)
    forward = [pixels * INPUTS, 4 * pixels, 2 * pixels * OUTPUTS]
    assert sizes == sorted([*forward, pixels * OUTPUTS, 4 * pixels, 9 * INPUTS * OUTPUTS, 2 * pixels * INPUTS])
    products = [group for group in work.batch if group.kind == INT8]
    assert sum(group.count for group in products) == 2
    assert sum(group.flops for group in products) == 2 * 2 * 9 * pixels * INPUTS * OUTPUTS
    assert not [group for group in work.batch if group.kind == CONVOLUTION]
    rotations = sum(group.flops for group in work.batch if group.kind == ROTATION)
    assert rotations == 2 * rotation.BLOCK * pixels * (1024 + INPUTS)  # a program rotates 1024 channels


def test_compiled_layer_has_one_graph_per_pass() -> None:
    _, eager = logged("int8", compiled=False)
    _, compiled = logged("int8", compiled=True)
    assert eager == compiled


def test_an_estimate_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kohya_ext.dry_run.triton_kernels.missing_triton", lambda: "Triton is not installed")
    with (
        pytest.raises(UserError, match="an 8-bit base cannot be estimated: Triton is not installed"),
        counted_kernels(eight_bits=True),
    ):
        pass
