"""The log of steps: storages that autograd adds to in place, results of operators that are reused, and steps after the last."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from kohya_ext.dry_run.events import Event, Kind  # noqa: E402
from kohya_ext.dry_run.request import Request  # noqa: E402
from kohya_ext.dry_run.tracker import BACKWARD, Tracker  # noqa: E402
from kohya_ext.dry_run.workspaces import buffer_bytes  # noqa: E402
from tests.fake_tensors import fake_tensors  # noqa: E402

USES = 8
MIB = 2**20


FAILED_COMPILATION = """
import torch
from kohya_ext.compiling.graph_breaks import breaks_the_graph
from tests.unit.test_step_log import test_gradients_of_many_uses_are_in_one_storage_that_is_freed as test
test()
assert breaks_the_graph(lambda: (torch._dynamo.graph_break, ()))
test()
"""


def test_gradients_are_in_one_storage_also_after_torch_has_failed_to_compile() -> None:
    """In a process of its own, because Python calls functions in another way from then on."""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", FAILED_COMPILATION], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_gradients_of_many_uses_are_in_one_storage_that_is_freed() -> None:
    with Tracker() as tracker:
        weight = torch.ones(MIB // 4, requires_grad=True)
        for _ in range(4):  # ids of Python objects are used again
            value = weight.exp()
            losses = [(value * number).sum() for number in range(USES)]
            before = len(tracker.events)
            with tracker.during(BACKWARD):
                torch.autograd.backward(losses)
            weight.grad = None
            allocated = sum(event.bytes == MIB for event in tracker.events[before:])
            assert allocated <= USES + 2  # a gradient of each use, of exp and of the weight: their sums take no memory
        del value, losses
    freed = {event.storage for event in tracker.events if event.bytes < 0}
    assert {event.storage for event in tracker.events} - freed == {0}  # the weight


def operators(row: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return new tensors, views and results of operators in place."""
    product = row @ weight
    parts = product.chunk(2, dim=1)
    added = product.add_(1)
    sums = torch._foreach_add([row, product], 1)
    torch._foreach_mul_(sums, 2)
    indices = product.max(dim=1)
    return [
        product,
        *parts,
        added,
        *sums,
        *indices,
        product.transpose(0, 1),
        product.expand(3, 2, 6),
        product.to(torch.bfloat16),
    ]


def described(tensors: list[torch.Tensor]) -> list[object]:
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, storages.index(storage))
        for tensor, storage in zip(tensors, storages, strict=True)
    ]


def test_reused_results_equal_those_of_the_operators() -> None:
    with FakeTensorMode():
        expected = described(operators(torch.ones(2, 4), torch.ones(4, 6)))
    with fake_tensors() as assumptions:
        first, second = (operators(torch.ones(2, 4), torch.ones(4, 6)) for _ in range(2))
        assert described(first) == described(second) == expected
        assert len(assumptions._results) >= len(expected) - 2
        assert torch.ones(3, 4).add(1).shape == (3, 4)  # another size


def test_a_number_that_is_added_to_an_assumed_length_counts() -> None:
    """Chroma's single blocks slice to the image's length plus the text's, which is on the GPU."""
    with fake_tensors() as assumptions:
        assumptions.integer = 5
        length = torch.ones(2, dtype=torch.long)[0]
        rows = torch.zeros(100, 3)
        assert (length.item(), (10 + length).item(), (length + 10 + 1).item()) == (5, 15, 16)
        assert rows[: 20 + length].shape == (25, 3)


@pytest.mark.parametrize(
    ("shape", "stride", "dims", "expected"),
    [
        ((1, 4608, 3072), (4608 * 3072, 3072, 1), (0, 1), 96 * MIB),  # as PyTorch 2.14 allocates on a virtual RTX 4090
        ((4, 8), (8, 1), (0,), 0),
        ((1, 640, 128, 128), (640 * 16384, 16384, 128, 1), (2, 3), 0),
        ((4096, 640), (640, 1), (), 0),
        ((), (), (), 0),
    ],
)
def test_memory_for_partial_sums(shape, stride, dims, expected) -> None:
    assert buffer_bytes(shape, stride, dims) == expected


def test_the_reserve_is_that_of_a_run_whose_gaps_between_tensors_have_stopped_growing(tmp_path, monkeypatch) -> None:
    """Two tensors are replaced in each step, in other places than the step before until the fourth."""
    pytest.importorskip("accelerate")
    from kohya_ext.dry_run.gpu_tracker import GpuTracker
    from kohya_ext.dry_run.steps import Steps

    begun = [(0, 31), (1, 20)]  # (storage, MiB)
    step = [(2, 31), (0, -31), (3, 30), (3, -30), (4, 12), (5, 20), (6, 20), (5, -20), (4, -12), (1, -20), (7, 24), (7, -24)]
    tracker = GpuTracker()
    tracker.events = [Event(storage, size * MIB, BACKWARD) for storage, size in begun + step]
    tracker.kinds = [Kind.TEMPORARY] * 8
    steps = Steps(tracker, Request("", "", [], 1, 1, 1, False, 0, *[False] * 7), tmp_path)
    steps.passes = [(len(begun), 0), (len(begun + step), 0)]
    steps.work = [tracker.take_work() for _ in steps.passes]
    monkeypatch.setattr(steps, "_name_kinds", lambda: None)
    result = steps.result()
    assert [each["reserved"] // MIB for each in result["passes"]] == [52, 104, 124, 148, 180, 180, 180]
    assert result["reserved"] == 180 * MIB
