"""optimizer_syncs: the weights of bitsandbytes and Prodigy, and how often their steps wait."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.optimizer_syncs import PATCH  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402

SHAPES = ((8, 6), (128, 64), (5,), (3, 4, 2))
STEPS = 7


@pytest.fixture
def patcher(tmp_path):
    patcher = Patcher({PATCH.name: PATCH}, Settings(), Checkout(tmp_path, None, "v0.11", "test"))
    yield patcher
    patcher.undo()


def train(kind, groups=({},), is_paged=False, **options):
    """Return the weights after each step, and the optimizer's state.

    The third parameter of a group has no gradient in the first two steps.
    """
    torch.manual_seed(1)
    parameters = [[torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in SHAPES] for _ in groups]
    parameters[0][0].data.zero_()  # as LoRA's second matrix
    kind = type("Optimizer", (kind,), {})  # torch wraps the step of a class when the first optimizer of it is created
    optimizer = kind([{"params": own, **group} for own, group in zip(parameters, groups, strict=True)], **options)
    optimizer.is_paged = is_paged
    weights = []
    for step in range(STEPS):
        for own in parameters:
            for index, parameter in enumerate(own):
                parameter.grad = None if index == 2 and step < 2 else parameter.detach() - 1
        optimizer.step()
        weights.append([parameter.detach().clone() for own in parameters for parameter in own])
    return weights, optimizer.state_dict()


def equal(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, ({},)),
        ({"weight_decay": 0.1, "use_bias_correction": True, "safeguard_warmup": True}, ({},)),
        ({"weight_decay": 0.1, "decouple": False, "slice_p": 3, "growth_rate": 1.02}, ({},)),
        ({"betas": (0.0, 0.99), "d_coef": 0.5, "beta3": 0.9}, ({}, {"lr": 0.0}, {"weight_decay": 0.2})),
    ],
)
def test_prodigy_is_bit_identical_and_reads_once_per_step(patcher, monkeypatch, options, groups):
    kind = pytest.importorskip("prodigyopt").Prodigy
    expected = train(kind, groups, **options)
    assert expected[1]["param_groups"][0]["d_hat"] > 1e-7, "the weights must have moved"
    patcher.arm()
    before = PATCH.facts()["steps"]
    read = torch.Tensor.item
    reads = []
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(self) or read(self))
    ours = train(kind, groups, **options)
    assert equal(ours, expected)
    parameters = sum(len(group["params"]) for group in ours[1]["param_groups"] if group["lr"])
    assert len(reads) <= 2 * 2 * parameters, "only steps that create state read each parameter"
    assert PATCH.facts()["steps"] - before == STEPS - 2, "two steps create state: the first, and that of the late gradient"


def test_prodigy_without_gradients_changes_nothing(patcher):
    kind = pytest.importorskip("prodigyopt").Prodigy
    patcher.arm()
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = type("Optimizer", (kind,), {})([parameter])
    before = {**optimizer.param_groups[0]}
    assert optimizer.step(lambda: 7) == 7
    assert before == optimizer.param_groups[0]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit", "PagedAdamW8bit"])
def test_bitsandbytes_waits_only_for_paged_state(patcher, monkeypatch, name):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    waits = []
    monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", waits.append)
    is_paged = name.startswith("Paged")
    kind = getattr(bitsandbytes.optim, name.removeprefix("Paged"))

    def run():
        waits.clear()
        return train(kind, is_paged=is_paged, lr=1e-3)

    expected = run()
    before = len(waits)
    patcher.arm()
    assert equal(run(), expected)
    assert before >= STEPS * 3
    assert len(waits) == (before if is_paged else 0)


def step_before_0_47(self, closure=None):
    """Update each parameter, and wait after it, as bitsandbytes 0.44 to 0.46 do."""
    for group_index, group in enumerate(self.param_groups):
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                if len(self.state[parameter]) == 0:
                    self.init_state(group, parameter, group_index, index)
                self.update_step(group, parameter, group_index, index)
                torch.cuda.synchronize()


@pytest.fixture
def use_step(monkeypatch):
    """Let bitsandbytes' optimizers have a step, as in a release without sync_gpu."""
    pytest.importorskip("bitsandbytes")
    module = sys.modules["bitsandbytes.optim.optimizer"]

    def use(function):
        step = types.FunctionType(function.__code__, vars(module), "step", (None,))
        step.__module__ = module.__name__
        monkeypatch.setattr(module.Optimizer8bit, "step", torch.no_grad()(step))
        return module.Optimizer8bit

    monkeypatch.delattr(module, "sync_gpu")
    return use


@pytest.mark.parametrize("is_paged", [False, True])
def test_bitsandbytes_before_0_47_waits_only_for_paged_state(patcher, monkeypatch, use_step, is_paged):
    """lora-scripts-next pins 0.46.0, and sd-scripts pinned 0.44.0 until 2025."""
    use_step(step_before_0_47)
    waits = []
    kind = sys.modules["bitsandbytes.optim"].AdamW8bit
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))

    def run():
        waits.clear()
        return train(kind, is_paged=is_paged, lr=1e-3)

    expected = run()
    before = len(waits)
    patcher.arm()
    assert equal(run(), expected)
    assert before >= STEPS * 3
    assert len(waits) == (before if is_paged else 0)
    torch.cuda.synchronize()
    assert waits, "outside the step PyTorch waits as before"


def test_bitsandbytes_that_waits_in_another_way_is_left_alone(patcher, use_step):
    kind = use_step(lambda self, closure=None: self)
    before = kind.step
    patcher.arm()
    assert kind.step is before
