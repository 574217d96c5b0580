"""fast_checkpoint_hooks frees every tensor after the backward pass."""

import gc

import pytest

torch = pytest.importorskip("torch")

import torch.utils.checkpoint as checkpointing  # noqa: E402
from kohya_ext.patches.fast_checkpoint_hooks import PATCH  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run.tracker import Allocations  # noqa: E402


def test_no_tensor_is_alive_after_backward(monkeypatch):
    """Use operators that save their own output: a hook that returns it unchanged creates a reference cycle."""
    (target,) = PATCH.targets
    assert target.expect(checkpointing._checkpoint_hook) is None
    hook = target.replace(checkpointing._checkpoint_hook, Settings())
    monkeypatch.setattr(checkpointing, "_checkpoint_hook", hook)
    x = torch.randn(64, 64, requires_grad=True)
    with Allocations() as allocations:
        for _ in range(3):
            out = checkpointing.checkpoint(lambda value: value.exp().softmax(-1).sigmoid(), x, use_reentrant=False)
            out.square().sum().backward()
    del out
    x.grad = None
    gc.collect()
    assert allocations.alive == 0
    assert allocations.peak > 0
