"""The Triton kernels of gates and rotary embeddings, in Triton's interpreter, and their memory and work on fake tensors."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


from kohya_ext.dry_run.tracker import BACKWARD, Tracker  # noqa: E402
from kohya_ext.dry_run.triton_kernels import counted_kernels  # noqa: E402
from kohya_ext.kernels import elementwise, fused  # noqa: E402
from tests import interpreted  # noqa: E402
from tests.fake_tensors import fake_tensors  # noqa: E402

INTERPRETED = """
import torch
from kohya_ext.kernels import elementwise

torch.manual_seed(0)
for dtype in (torch.float16, torch.float32):
    for width in (40, 1500):
        halves, gradient = torch.randn(2, 3, 2 * width).to(dtype), torch.randn(2, 3, width).to(dtype)
        exact = halves.double().requires_grad_()
        value, gate = exact.chunk(2, dim=-1)
        result = value * torch.nn.functional.gelu(gate)
        result.backward(gradient.double())
        eps = max(torch.finfo(dtype).eps, 4e-7)
        torch.testing.assert_close(elementwise.geglu(halves).double(), result.detach(), rtol=eps, atol=eps)
        torch.testing.assert_close(elementwise.geglu_backward(gradient, halves).double(), exact.grad, rtol=eps, atol=2 * eps)
        gate, value = (half.contiguous() for half in halves.chunk(2, dim=-1))
        exact = [half.double().requires_grad_() for half in (gate, value)]
        result = torch.nn.functional.silu(exact[0]) * exact[1]
        result.backward(gradient.double())
        torch.testing.assert_close(elementwise.swiglu(gate, value).double(), result.detach(), rtol=eps, atol=eps)
        for ours, half in zip(elementwise.swiglu_backward(gradient, gate, value), exact, strict=True):
            torch.testing.assert_close(ours.double(), half.grad, rtol=eps, atol=2 * eps)
    for images, tables, width in ((1, 1, 8), (3, 1, 128), (3, 3, 64)):
        # As sd-scripts' queries: tokens before heads in memory.
        x = torch.randn(images, 40, 2, width).to(dtype).transpose(1, 2)
        angles = torch.randn(tables, 1, 40, width // 2)
        rotations = torch.polar(torch.ones_like(angles), angles)
        exact = torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2))) * rotations.to(torch.complex128)
        assert elementwise.rotates(x, rotations)
        turned = elementwise.rotate(x, rotations, inverse=False)
        torch.testing.assert_close(turned.double(), torch.view_as_real(exact).flatten(-2), rtol=eps, atol=eps)
        back = elementwise.rotate(turned.contiguous(), rotations, inverse=True)
        torch.testing.assert_close(back, x, rtol=4 * eps, atol=8 * eps)
        assert turned.stride() == x.stride() != back.stride() == turned.contiguous().stride()
        # The same pairs, one element of each in the first half.
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned_halves = elementwise.rotate(halves, rotations, inverse=False, halves=True)
        assert torch.equal(turned_halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), turned)
        back = elementwise.rotate(turned_halves, rotations, inverse=True, halves=True)
        torch.testing.assert_close(back, halves, rtol=4 * eps, atol=8 * eps)
print("equal")
"""


def test_kernels_are_within_one_rounding_of_float64():
    done = interpreted.run(INTERPRETED)
    assert done.stdout == "equal\n", done.stderr[-3000:]


def test_on_a_cpu_torch_computes_the_gate():
    assert fused.elementwise_kernels("cpu", torch.bfloat16) is None


def test_kernels_that_fail_are_replaced_with_a_warning(monkeypatch, capsys):
    def zeros(*_, **__):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert fused.elementwise_kernels.__wrapped__("cuda", torch.bfloat16) is None
    assert (
        "gates and rotary embeddings take more passes over memory, because its Triton kernels failed: RuntimeError: no C"
        in capsys.readouterr().err
    )


def test_other_shapes_are_not_rotated_by_the_kernel():
    x, rotations = torch.zeros(2, 3, 5, 8), torch.zeros(1, 1, 5, 4, dtype=torch.complex64)
    assert elementwise.rotates(x, rotations)
    assert not elementwise.rotates(x[0], rotations)
    assert not elementwise.rotates(x.transpose(2, 3), rotations)
    assert not elementwise.rotates(x, rotations.expand(2, 3, 5, 4))
    assert not elementwise.rotates(x, rotations[:, :, :1])


def test_an_estimate_counts_one_kernel_each_way_of_a_rotation():
    shape = 1, 2, 64, 128
    with fake_tensors(), counted_kernels(eight_bits=False):
        x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        rotations = torch.zeros(1, 1, 64, 64, dtype=torch.complex64)
        gradient = torch.zeros(shape, dtype=torch.bfloat16)
        with Tracker() as tracker:
            out = fused.rotate(x, rotations)
            with tracker.during(BACKWARD):
                out.backward(gradient)
    kernels = [group for group in tracker.work.work().batch if group.bytes]
    assert sum(group.count for group in kernels) == 2
    assert sum(group.bytes for group in kernels) == 2 * (2 * 2 * x.numel() + 8 * rotations.numel())


def test_an_estimate_counts_one_kernel_each_way():
    rows, width = 64, 640
    with fake_tensors(), counted_kernels(eight_bits=False):
        halves = torch.zeros(rows, 2 * width, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.zeros(rows, width, dtype=torch.bfloat16)
        with Tracker() as tracker:
            out = fused.geglu(halves)
            with tracker.during(BACKWARD):
                out.backward(gradient)
    kernels = [group for group in tracker.work.work().batch if group.bytes >= 2 * rows * width * 3]
    assert sum(group.count for group in kernels) == 2
    assert sum(group.bytes for group in kernels) == 2 * rows * width * (3 + 5)
    assert fused.elementwise_kernels("cpu", torch.bfloat16) is None


def test_an_estimate_counts_one_kernel_each_way_of_a_gate_of_two_tensors():
    rows, width = 64, 640
    with fake_tensors(), counted_kernels(eight_bits=False):
        gate, value = (torch.zeros(rows, width, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        gradient = torch.zeros(rows, width, dtype=torch.bfloat16)
        with Tracker() as tracker:
            out = fused.swiglu(gate, value)
            with tracker.during(BACKWARD):
                out.backward(gradient)
    kernels = [group for group in tracker.work.work().batch if group.bytes >= 2 * rows * width * 3]
    assert sum(group.count for group in kernels) == 2
    assert sum(group.bytes for group in kernels) == 2 * rows * width * (3 + 5)
