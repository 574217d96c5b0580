"""adaptive_lr: a factor on any schedule, and clipping of unusually large gradients."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import adaptive_lr  # noqa: E402
from kohya_ext.patches.adaptive_lr import Adaptive  # noqa: E402

from kohya_ext.patching.step_values import StepValues  # noqa: E402


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.zeros(4))


@pytest.fixture
def optimizer(weight):
    return torch.optim.SGD([weight], lr=1.0)


@pytest.fixture
def controller(optimizer):
    accelerator = SimpleNamespace(
        _optimizers=[optimizer], sync_gradients=True, num_processes=1, device="cpu", is_main_process=True
    )
    return Adaptive(accelerator, patience=2)


def test_factor_multiplies_a_recursive_schedule(controller, optimizer):
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    rates = []
    for step, loss in enumerate([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1]):
        controller.before_batch(controller.accelerator)
        controller.add_loss(torch.tensor(loss))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        controller.restore_rates()
        schedule.step()
        controller.after_batch(controller.accelerator)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.9 ** (step + 1))
    factors = [1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25]
    assert rates == pytest.approx([0.9**step * factor for step, factor in enumerate(factors)])
    assert controller.factor == 0.25, "a falling mean loss must not halve the factor"


def test_loss_that_is_not_finite_is_ignored(controller):
    for loss in (2.0, float("nan")):
        controller.add_loss(torch.tensor(loss))
        controller.after_batch(controller.accelerator)
    assert controller.best == 2.0


def test_unusually_large_gradient_is_scaled_to_the_usual_norm(controller, weight, optimizer, capsys):
    for norm in [1.0] * 30 + [3.9, 8.0]:
        weight.grad = torch.full((4,), norm / 2)
        controller.clip_unusual(optimizer)
        assert float(weight.grad.norm()) == pytest.approx(1.0 if norm == 8.0 else norm)
    assert capsys.readouterr().err.count("clipped to 1") == 1


def test_gradient_that_the_script_has_clipped_is_scaled_to_the_usual_norm(controller, weight, optimizer, monkeypatch):
    controller.max_grad_norm = 2.0
    for norm in [1.0] * 30 + [8.0]:
        values = StepValues()
        values.record_norm(torch.tensor(norm))
        monkeypatch.setattr(adaptive_lr, "step_values", lambda values=values: values)
        weight.grad = torch.full((4,), min(norm, 2.0) / 2)
        controller.clip_unusual(optimizer)
    assert float(weight.grad.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("best", [0.3, None], ids=["later", "in the first window"])
def test_state_is_restored(controller, tmp_path, best):
    controller.add_loss(torch.tensor(0.1))
    controller.step, controller.factor, controller.best = 7, 0.25, best
    controller.norms.extend([0.1, 0.2])
    controller.on_state_save(tmp_path)
    resumed = Adaptive(controller.accelerator, patience=2)
    resumed.on_state_load(tmp_path)
    resumed.add_loss(torch.tensor(0.2))
    controller.add_loss(torch.tensor(0.2))
    assert (resumed.step, resumed.factor, resumed.best, resumed.norms) == (7, 0.25, best, controller.norms)
    assert torch.equal(resumed.loss_sum, controller.loss_sum)


def test_factor_has_a_lower_limit(controller):
    for _ in range(20):
        controller.update_factor(1.0)
    assert controller.factor == 2**-6
