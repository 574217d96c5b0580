"""The log of storages: what CUDA's kernels allocate in addition."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kohya_ext.dry_run.cuda_operators import bias_in_place
from kohya_ext.dry_run.tracker import BACKWARD, Tracker

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 256, 64
BYTES = 2 * BATCH * HEADS * LENGTH * WIDTH


def heads_first(transposed: bool) -> torch.Tensor:
    """Return a tensor of shape (batch, heads, length, width), whose memory has the heads after the length if transposed."""
    shape = (BATCH, LENGTH, HEADS, WIDTH) if transposed else (BATCH, HEADS, LENGTH, WIDTH)
    tensor = torch.zeros(shape, dtype=torch.bfloat16)
    return tensor.transpose(1, 2) if transposed else tensor


@pytest.mark.parametrize(
    ("inputs", "gradient", "copies"), [(True, True, 0), (True, False, 1), (False, True, 1), (False, False, 2)]
)
def test_flash_attention_copies_a_gradient_and_an_output_whose_heads_come_first(
    inputs: bool, gradient: bool, copies: int
) -> None:
    """Compared with torch 2.14 on the virtual GPU, where the output has the layout of the query."""
    with FakeTensorMode(), Tracker() as tracker:
        query = heads_first(inputs).requires_grad_()
        output = torch.nn.functional.scaled_dot_product_attention(query, query.detach(), query.detach())
        given = heads_first(gradient)
        start = len(tracker.events)
        with tracker.during(BACKWARD):
            torch.autograd.grad(output, query, given)
        allocated = [event.bytes for event in tracker.events[start:] if event.bytes > 0]
    gradients = 3
    assert allocated.count(BYTES) == gradients + copies


@pytest.mark.parametrize("grad", [False, True])
def test_a_linear_layer_adds_its_bias_in_place(grad: bool) -> None:
    with FakeTensorMode(), torch.set_grad_enabled(grad):
        layer = torch.nn.Linear(32, 16)
        for values in (torch.zeros(3, 8, 64)[..., 1:33], torch.zeros(3, 8, 32), torch.zeros(8, 32), torch.zeros(2, 3, 8, 32)):
            size = 4 * 16 * values.numel() // 32
            with bias_in_place(), Tracker() as tracker:
                result = layer(values)
            assert [event.bytes for event in tracker.events if event.bytes == size] == [size]
            assert result.shape == (*values.shape[:-1], 16)
    assert torch.equal(torch.nn.functional.linear(torch.ones(1, 2, 2), torch.eye(2)), torch.ones(1, 2, 2)), "as before outside"


@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4), (2, 3, 5, 4)])
def test_a_linear_layer_computes_the_same(shape: tuple[int, ...]) -> None:
    layer, values = torch.nn.Linear(4, 2), torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    expected = layer(values)
    with bias_in_place():
        assert torch.allclose(layer(values), expected)
        assert torch.allclose(torch.nn.functional.linear(values, layer.weight), expected - layer.bias)


def test_operators_that_launch_nothing_are_no_kernels_in_either_count() -> None:
    with FakeTensorMode(), Tracker() as tracker:
        rows = torch.zeros(6, 4)
        start, before = tracker.kernels, sum(group.count for group in tracker.work.work().batch)
        torch.ops.aten._unsafe_view(rows, (2, 3, 4)).view(24).set_(rows.neg())
        count = sum(group.count for group in tracker.work.work().batch)
    assert (tracker.kernels - start, count - before) == (1, 1)
