"""LoHa layers compute bit-identical changes and gradients without creating their scale in every pass."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.loha_scale import PATCH  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

LAYERS = {
    "linear": lambda: torch.nn.Linear(8, 12),
    "1x1": lambda: torch.nn.Conv2d(8, 12, 1),
    "flat": lambda: torch.nn.Conv2d(8, 12, 3, padding=1),
    "tucker": lambda: torch.nn.Conv2d(8, 12, 3, padding=1),
}


def layer_of(module, kind):
    torch.manual_seed(0)
    layer = module.LoHaModule("loha", LAYERS[kind](), lora_dim=4, alpha=3, use_tucker=kind == "tucker")
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


def results(layer):
    """Return the change of a layer's weight in two passes, and the gradients of their sum."""
    changes = [layer.get_diff_weight(), layer.get_diff_weight()]
    sum(change.float().square().sum() for change in changes).backward()
    gradients = [weight.grad for weight in layer.parameters()]
    layer.zero_grad()
    return [*changes, *gradients]


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_bit_identical_and_create_their_scale_once(checkout, checkout_module, kind, monkeypatch):
    if not (checkout.path / "networks" / "loha.py").exists():
        assert all(checkout.lacks(target.module) for target in PATCH.targets)
        return
    module, patcher = checkout_module("networks.loha"), Patcher({PATCH.name: PATCH}, Settings(), checkout)
    dtypes = (torch.float32, torch.bfloat16)
    expected = [results(layer_of(module, kind).to(dtype)) for dtype in dtypes]
    patcher.arm()
    layer, created, create = layer_of(module, kind), [], torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, **kwargs: created.append(kwargs["dtype"]) or create(*args, **kwargs))
    for dtype, tensors in zip(dtypes, expected, strict=True):
        for ours, theirs in zip(results(layer.to(dtype)), tensors, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)
    assert created == [*dtypes], "once for each precision"
    patcher.undo()
