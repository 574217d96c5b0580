"""Losses and gradient norm of a step are read together, and the script's loss stays readable."""

import math

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patching.step_values import StepValues  # noqa: E402


@pytest.mark.parametrize("is_old", [False, True])
def test_losses_and_norm_are_read_once(monkeypatch, is_old):
    if is_old:
        monkeypatch.delattr(torch.nn.utils, "get_total_norm", raising=False)  # as before torch 2.6
    values = StepValues()
    values.record_loss(torch.tensor(0.5, requires_grad=True))
    assert values.read_losses() == [0.5]
    values.record_loss(torch.tensor(float("nan")))
    gradients = [torch.tensor([3.0, 4.0])]
    assert values.read_norm(gradients) == 5.0
    assert values.read_losses()[0] == 0.5
    assert math.isnan(values.read_losses()[1])
    gradients[0].zero_()
    assert values.read_norm(gradients) == 5.0


def test_norm_of_the_script_comes_before_the_gradients_own():
    values = StepValues()
    assert not values.has_norm
    values.record_norm(torch.tensor(7.0))
    assert values.has_norm
    assert values.read_norm([torch.tensor([3.0, 4.0])]) == 7.0


def test_step_without_values_is_empty():
    assert StepValues().read_losses() == []
