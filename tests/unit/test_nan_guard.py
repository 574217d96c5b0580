"""nan_guard drops the gradients of a loss that is not finite."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.nan_guard import _gradients_dropped  # noqa: E402


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
