"""DyLoRA with gradient checkpointing gives bit-identical gradients."""

import importlib
import random
import sys

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import nonreentrant_checkpointing  # noqa: E402
from kohya_ext.patches.dylora_ranks import PATCH  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

pytestmark = pytest.mark.thorough

RANKS, STEPS = 4, 12
LORA = "sdxl_train_network.py"


@pytest.fixture
def dylora(checkout, monkeypatch):
    """The checkout's DyLoRA module, and a patcher that is not armed."""
    monkeypatch.syspath_prepend(str(checkout.path))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("library", "networks")]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("networks.dylora"), Patcher({PATCH.name: PATCH}, Settings(), checkout)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("library", "networks")]:
        del sys.modules[name]


def steps_of(module, checkpointing, use_reentrant=False):
    """Return each step's gradients (None where a rank was not trained) and Python's final random state."""
    torch.manual_seed(0)
    random.seed(0)
    layer = torch.nn.Linear(8, 8)
    network = module.DyLoRAModule("lora", layer, lora_dim=RANKS, alpha=1, unit=1)
    network.apply_to()
    weights = [*network.lora_A, *network.lora_B]
    steps = []
    for _ in range(STEPS):
        x = torch.randn(2, 8, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=use_reentrant) if checkpointing else layer(x)
        y.pow(2).sum().backward()
        steps.append([None if weight.grad is None else weight.grad.clone() for weight in weights])
        for weight in weights:
            weight.grad = None
    return steps, random.getstate()


def trained(steps):
    return sum(gradient is not None for step in steps for gradient in step)


def assert_equal(steps, expected):
    for ours, theirs in zip(steps, expected, strict=True):
        for gradient, expected_gradient in zip(ours, theirs, strict=True):
            assert gradient is expected_gradient is None or torch.equal(gradient, expected_gradient)


def test_gradients_equal_those_without_checkpointing(dylora):
    module, patcher = dylora
    expected, random_state = steps_of(module, checkpointing=False)
    assert trained(expected) == 2 * STEPS, "expected one rank, up and down, per step"
    assert trained(steps_of(module, checkpointing=True)[0]) < 2 * STEPS, "upstream draws other ranks when it recomputes"
    original = module.DyLoRAModule.forward
    patcher.arm()
    assert module.DyLoRAModule.forward is not original
    steps, patched_random_state = steps_of(module, checkpointing=True)
    assert patched_random_state == random_state
    assert_equal(steps, expected)
    patcher.undo()
    assert module.DyLoRAModule.forward is original


def test_gradients_are_the_same_in_sdxl(dylora):
    """SDXL's U-Net uses reentrant checkpointing, which nonreentrant_checkpointing replaces."""
    module, patcher = dylora
    expected = steps_of(module, checkpointing=False)
    patches = {patch.name: patch for patch in (PATCH, nonreentrant_checkpointing.PATCH)}
    both = Patcher(patches, Settings(), patcher.checkout)
    both.arm()
    steps, random_state = steps_of(module, checkpointing=True, use_reentrant=True)
    both.undo()
    assert random_state == expected[1]
    assert_equal(steps, expected[0])


@pytest.mark.oldest
def test_real_script_trains_the_same_weights(checkout, train):
    more = ("--network_module", "networks.dylora", "--network_args", "unit=1", "--network_train_unet_only")
    checkpointed, plain = (train(checkout, LORA, *more, without=without) for without in ((), ("--gradient_checkpointing",)))
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in checkpointed.tensors.items())
