"""Copies of LoRA weights in 16 bits, by one kernel for many."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.kernels import casts  # noqa: E402
from tests.counting import recorded_operators  # noqa: E402

SHAPES = ((4, 7), (9, 4), (3, 3, 2, 2))


def _weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def _trained(weights, copies):
    sum((copy.float() ** 3).sum() for copy in copies).backward()
    return [weight.grad for weight in weights]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_single_copies(dtype):
    ours, theirs = _weights(), _weights()
    copies, singles = casts.copies(ours, dtype), [weight.to(dtype) for weight in theirs]
    for copy, single in zip([*copies, *_trained(ours, copies)], [*singles, *_trained(theirs, singles)], strict=True):
        assert copy.dtype is single.dtype
        assert torch.equal(copy, single)


def test_all_weights_are_copied_at_once_and_all_gradients_too():
    weights = _weights()
    with recorded_operators() as operators:
        copies = casts.copies(weights, torch.bfloat16)
    assert [name for name in operators if "copy" in name] == ["aten::_foreach_copy_"]
    with recorded_operators() as operators:
        torch.autograd.backward(copies, [torch.ones_like(copy) for copy in copies])
    assert [name for name in operators if "copy" in name] == ["aten::_foreach_copy_"]


def test_frozen_and_unused_weights_get_no_gradient():
    first, second, third = _weights()
    second.requires_grad_(False)
    copies = casts.copies([first, second, third], torch.bfloat16)
    assert [copy.requires_grad for copy in copies] == [True, False, True]
    (copies[0].sum() + copies[1].sum()).backward()
    assert first.grad is not None
    assert (second.grad, third.grad) == (None, None)


def test_layers_have_their_weights_again_after_an_error():
    layers = [torch.nn.Linear(4, 4), torch.nn.Conv2d(4, 4, 1)]
    weights = [layer.weight for layer in layers]

    def fail():
        with torch.autocast("cpu", torch.bfloat16), casts.together(layers) as count:
            assert count == 2
            assert {layer.weight.dtype for layer in layers} == {torch.bfloat16}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))


@pytest.mark.parametrize("why", ["no autocast", "no layers", "a weight in 16 bits", "a weight that DeepSpeed has divided"])
def test_weights_that_autocast_would_not_copy_stay(why):
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    if why == "a weight in 16 bits":
        layers[1].bfloat16()
    if why == "a weight that DeepSpeed has divided":
        layers[1].weight.ds_id = 1
    weights = [layer.weight for layer in layers]
    used = [] if why == "no layers" else layers
    with torch.autocast("cpu", torch.bfloat16, enabled=why != "no autocast"), casts.together(used) as count:
        assert count == 0
        assert all(layer.weight is weight for layer, weight in zip(layers, weights, strict=True))


def test_weights_are_copied_without_gradients_but_not_where_a_layer_may_run_again():
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with casts.together([layer]) as count:
            assert (count, layer.weight.requires_grad) == (1, False)
        with casts.apart(), casts.together([layer]) as count:
            assert (count, layer.weight.requires_grad) == (0, True)
