"""nan_guard drops the gradients of a loss that is not finite."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.nan_guard import _are_finite, _gradients_dropped  # noqa: E402


def test_gradients_are_dropped_and_hooks_restored():
    hooked, plain, frozen = (torch.nn.Parameter(torch.ones(2), requires_grad=required) for required in (True, True, False))
    called = []
    handle = hooked.register_post_accumulate_grad_hook(lambda weight: called.append("hooked"))

    def backward():
        hooked.grad = plain.grad = None
        called.clear()
        (hooked * plain * frozen).sum().backward()
        return called

    with _gradients_dropped([hooked, plain, frozen]):
        assert backward() == []
        assert hooked.grad is None
        assert plain.grad is None
    assert backward() == ["hooked"]
    assert plain.grad is not None

    with pytest.raises(KeyError), _gradients_dropped([hooked, plain]):
        raise KeyError
    plain.register_post_accumulate_grad_hook(lambda weight: called.append("plain"))
    assert sorted(backward()) == ["hooked", "plain"]
    handle.remove()
    assert backward() == ["plain"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_single_bad_weight_is_detected(dtype, bad):
    largest = torch.finfo(dtype).max
    weights = [torch.full((5, 3), largest, dtype=dtype), torch.zeros(7)]
    assert _are_finite(weights)
    weights[1][4] = bad
    assert not _are_finite(weights)
    weights[1][4] = 0
    weights[0][2, 1] = bad
    assert not _are_finite(weights)


def test_no_weights_are_finite():
    assert _are_finite([])
