"""Saved states of an optimizer: their types, those of options that are off, and other forms."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.exact_resume import _load_optimizer  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.optimizers import saved_states  # noqa: E402
from kohya_ext.optimizers.master_weights import LOWER  # noqa: E402
from kohya_ext.optimizers.probes import states_of_the_weights_type  # noqa: E402
from kohya_ext.optimizers.stochastic_rounding import StochasticRounding  # noqa: E402
from kohya_ext.optimizers.weight_steps import RoundedSteps, WeightSteps  # noqa: E402

tree_leaves = torch.utils._pytree.tree_leaves

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = ((8, 6), (5,), (3, 4, 2, 2))


def weights_of(dtype):
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(weights, step):
    for place, weight in enumerate(weights):
        weight.grad = torch.cos(torch.arange(weight.numel()) * (step + place + 1.0)).view(weight.shape).to(weight.dtype)


def optimizer_of(kind, weights):
    module, _, name = kind.partition(":")
    options = {"relative_step": False, "scale_parameter": False} if name == "Adafactor" else {}
    return getattr(pytest.importorskip(module), name)(weights, lr=0.01, **options)


def load(optimizer, saved, masters=False):
    saved_states.load(optimizer, optimizer.load_state_dict, saved, masters)


def usual_step(optimizer, weights, masters):
    optimizer.step()


def released_step(optimizer, weights, masters):
    names = states_of_the_weights_type(optimizer)
    is_rounded = weights[0].dtype is BF16
    rounding = StochasticRounding("cpu", 1)
    steps = RoundedSteps(optimizer, rounding, names, None, masters=masters) if is_rounded else WeightSteps(optimizer)
    for weight in weights:
        steps.step(weight)


def types_of(optimizer, weights):
    tensors = [{name: each for name, each in optimizer.state[weight].items() if torch.is_tensor(each)} for weight in weights]
    return [{name: each.dtype for name, each in state.items()} for state in tensors]


@pytest.mark.parametrize(
    ("step", "before", "after", "masters"),
    [
        (usual_step, F32, BF16, False),
        (usual_step, BF16, F32, False),
        (released_step, F32, BF16, False),
        (released_step, BF16, F32, False),
        (released_step, F32, BF16, True),
    ],
)
@pytest.mark.parametrize(
    "kind",
    [
        "torch.optim:AdamW",
        "transformers.optimization:Adafactor",
        "lion_pytorch:Lion",
        "pytorch_optimizer:CAME",
        "torch.optim:SGD",
    ],
)
def test_states_of_weights_of_another_type_are_those_that_the_optimizer_keeps(kind, step, before, after, masters):
    saved, fresh, resumed = (weights_of(dtype) for dtype in (before, after, after))
    optimizers = [optimizer_of(kind, weights) for weights in (saved, fresh, resumed)]
    for number in range(2):
        for optimizer, weights in zip(optimizers[:2], (saved, fresh), strict=True):
            give_gradients(weights, number)
            step(optimizer, weights, masters and optimizer is optimizers[1])
    load(optimizers[2], optimizers[0].state_dict(), masters)
    for weight, trained in zip(resumed, saved, strict=True):
        weight.data.copy_(trained)
    for optimizer, weights in zip(optimizers, (saved, fresh, resumed), strict=True):
        give_gradients(weights, 2)
        step(optimizer, weights, masters and optimizer is not optimizers[0])
    assert types_of(optimizers[2], resumed) == types_of(optimizers[1], fresh)
    for weight, trained in zip(resumed, saved, strict=True):
        torch.testing.assert_close(weight.float(), trained.float(), rtol=2**-6, atol=0.004)  # less than a step


def test_lower_bits_of_a_master_weight_go_on_a_resume_without_the_option():
    weights = weights_of(BF16)
    optimizers = [torch.optim.AdamW(weights) for _ in range(2)]
    give_gradients(weights, 1)
    released_step(optimizers[0], weights, masters=True)
    load(optimizers[1], optimizers[0].state_dict(), masters=True)
    lower = [[optimizer.state[weight][LOWER] for weight in weights] for optimizer in optimizers]
    assert all(torch.equal(*pair) and pair[1].any() for pair in zip(*lower, strict=True))
    load(optimizers[1], optimizers[0].state_dict(), masters=False)
    assert not any(LOWER in state for state in optimizers[1].state.values())


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_lower_bits_go_without_gradient_release(dtype):
    saved, weights = weights_of(BF16), weights_of(dtype)
    optimizer, resumed = torch.optim.AdamW(saved), torch.optim.AdamW(weights)
    give_gradients(saved, 1)
    released_step(optimizer, saved, masters=True)
    accelerated = type("Accelerated", (), {"optimizer": resumed})()
    of_class = _load_optimizer(lambda self, state: self.optimizer.load_state_dict(state), Settings())
    of_class(accelerated, optimizer.state_dict())
    assert not any(LOWER in state for state in resumed.state.values())
    give_gradients(weights, 1)
    resumed.step()


def test_master_weights_begin_as_the_bf16_weights_of_a_state_without_them():
    saved, weights = weights_of(BF16), weights_of(BF16)
    optimizer, resumed = torch.optim.SGD(saved, lr=0.0), torch.optim.SGD(weights)
    give_gradients(saved, 1)
    released_step(optimizer, saved, masters=False)
    load(resumed, optimizer.state_dict(), masters=True)
    before = [weight.detach().clone() for weight in weights]
    give_gradients(weights, 1)
    released_step(resumed, weights, masters=True)
    assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True))
    assert not any(resumed.state[weight][LOWER].any() for weight in weights)


def test_float32_states_of_bf16_weights_are_loaded_as_they_were_saved():
    optimizers = [torch.optim.AdamW(weights_of(torch.bfloat16)) for _ in range(2)]
    for group in optimizers[0].param_groups:
        for weight in group["params"]:
            value = torch.full_like(weight.detach(), 1 + 2**-20, dtype=torch.float32)
            optimizers[0].state[weight] = {"step": torch.tensor(3.0), "mean": value, "of_sides": [value.double(), weight]}
    load(optimizers[1], optimizers[0].state_dict())
    states = [each for optimizer in optimizers for each in tree_leaves([*optimizer.state.values()])]
    assert len(states) == 2 * 4 * len(SHAPES)
    torch.testing.assert_close(states[: len(states) // 2], states[len(states) // 2 :], rtol=0, atol=0)


@pytest.mark.parametrize("saved", [{"mine": 1}, {"param_groups": [], "state": {}}])
def test_a_state_in_another_form_is_loaded_as_its_optimizer_does(saved):
    loaded = []
    saved_states.load(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), loaded.append, saved, masters=False)
    assert loaded == [saved]


def test_a_number_that_an_optimizer_loads_as_a_tensor_stays_one():
    """As AdamW does with the step of a state that an old PyTorch has saved."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = 1.0
    load(optimizer, saved)
    assert torch.equal(optimizer.state[weight]["step"], torch.tensor(1.0))
