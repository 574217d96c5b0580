"""fast_checkpoint_hooks: bit-identical gradients, equal memory and the same errors as torch's own hooks."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import fast_checkpoint_hooks  # noqa: E402
from torch.utils import checkpoint as checkpointing  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run.events import Kind, peak  # noqa: E402
from kohya_ext.dry_run.tracker import BACKWARD, Tracker  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402

NAME = fast_checkpoint_hooks.PATCH.name


@pytest.fixture
def recomputed_blocks(monkeypatch, tmp_path):
    """Apply the patch; return a list with an entry for each block that it has recomputed."""
    original, seen = checkpointing._checkpoint_hook, []
    inputs = fast_checkpoint_hooks._inputs
    monkeypatch.setattr(fast_checkpoint_hooks, "_inputs", lambda frame: seen.append("a block") or inputs(frame))
    patcher = Patcher({NAME: fast_checkpoint_hooks.PATCH}, Settings(), Checkout(tmp_path, None, "v0.11", "made"))
    patcher.arm()
    assert [outcome.status for outcome in patcher.outcomes.values()] == ["applied"]
    yield seen
    patcher.undo()
    assert checkpointing._checkpoint_hook is original


class Block(torch.nn.Module):
    """The operations of a block: norm, frozen and trained weight, dropout, residual, with or without autocast."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)
        self.frozen = torch.nn.Linear(16, 64).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 16, bias=False)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.up(self.down(torch.nn.functional.gelu(self.frozen(self.norm(x))))))


def run(block, x, kind, bf16=False, again=False):
    """Return the output and all gradients of three consecutive blocks. ``kind`` calls a block, checkpointed or not."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    block.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = kind(block, kind(block, kind(block, x))).float().square().sum()
    loss.backward(retain_graph=again)
    if again:
        loss.backward()
    return [loss, x.grad, *(parameter.grad.clone() for parameter in block.parameters() if parameter.grad is not None)]


def plain(function, x):
    return function(x)


def checkpointed(function, x):
    return checkpointing.checkpoint(function, x, use_reentrant=False)


def nested(function, x):
    return checkpointed(lambda y: checkpointed(function, y), x)


@pytest.mark.parametrize("kind", [checkpointed, nested])
@pytest.mark.parametrize(("bf16", "again"), [(False, False), (True, False), (False, True)])
def test_gradients_are_bitwise_identical_to_those_without_checkpointing(recomputed_blocks, kind, bf16, again):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 5, 16)
    expected, actual = (run(block, x, wrapper, bf16, again) for wrapper in (plain, kind))
    assert len(recomputed_blocks) >= 3
    assert len(expected) == len(actual) > 4
    for theirs, ours in zip(expected, actual, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_bitwise_identical_without_early_stop(recomputed_blocks):
    block, x = Block(), torch.randn(2, 5, 16)
    with checkpointing.set_checkpoint_early_stop(False):
        actual = run(block, x, checkpointed)
    for theirs, ours in zip(run(block, x, plain), actual, strict=True):
        assert torch.equal(ours, theirs)


def memory(block, x):
    """Return the peak bytes and the number of allocated storages of a step of three blocks."""
    with Tracker() as tracker:
        tracker.mark([x, *block.parameters()], Kind.WEIGHT)
        loss = checkpointed(block, checkpointed(block, checkpointed(block, x))).square().sum()
        with tracker.during(BACKWARD):
            loss.backward()
    return peak(tracker.events, tracker.kinds).bytes, len(tracker.kinds)


def test_allocations_equal_those_of_torch(recomputed_blocks):
    torch.manual_seed(0)
    block, x = Block(), torch.randn(64, 5, 16, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "_checkpoint_hook", checkpointing._checkpoint_hook.__bases__[0])
        theirs = memory(block, x)
        assert not recomputed_blocks
    x.grad = None
    block.zero_grad()
    assert memory(block, x) == theirs
    assert len(recomputed_blocks) == 3


@pytest.mark.parametrize("change", ["shape", "fewer", "more"])
def test_a_different_recomputation_is_an_error(recomputed_blocks, change):
    """A block whose recomputation differs, so that its gradients would be wrong."""
    calls = []

    def unsteady(x):
        calls.append(x)
        first = len(calls) == 1
        if change == "shape":
            return (x if first else x[:1]).sin().cos().sum()
        for _ in range(3 if first == (change == "fewer") else 2):
            x = x.sin()
        return x.sum()

    with checkpointing.set_checkpoint_early_stop(False):
        loss = checkpointed(unsteady, torch.randn(4, 4, requires_grad=True))
        with pytest.raises(checkpointing.CheckpointError, match="recomput"):
            loss.backward()
    assert len(recomputed_blocks) == 1
