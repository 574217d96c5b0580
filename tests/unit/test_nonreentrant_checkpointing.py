"""nonreentrant_checkpointing: gradients of any block, and the memory that it frees."""

import functools
import gc
import random
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

import torch.utils.checkpoint as checkpointing  # noqa: E402
from kohya_ext.patches import nonreentrant_checkpointing  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run.tracker import Allocations  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402

PATCH = nonreentrant_checkpointing.PATCH
WIDTH = 16


@pytest.fixture
def patched(tmp_path):
    original = checkpointing.CheckpointFunction
    patcher = Patcher({PATCH.name: PATCH}, Settings(), Checkout(tmp_path, None, "v0.11", "test"))
    patcher.arm()
    assert [outcome.status for outcome in patcher.outcomes.values()] == ["applied"]
    yield
    patcher.undo()
    assert checkpointing.CheckpointFunction is original


def adapt(layer):
    """Replace the forward of a layer by an adapter's, as LoRA networks do, and return the adapter."""
    adapter = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
    original = layer.forward

    class Adapter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.down = adapter

        def forward(self, x):
            return original(x) + self.down(x)

    module = Adapter()
    layer.forward = module.forward
    return module


class Block(torch.nn.Module):
    """A residual block on a frozen base, with an adapter, dropout, two inputs and an input that is used several times."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH).requires_grad_(False)
        self.inner = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.text = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.dropout = torch.nn.Dropout(0.2)
        self.gradient_checkpointing = False

    def body(self, x, text):
        attended = self.inner(self.norm(x)) * self.text(text).sigmoid() + text.mean()
        return x + self.dropout(attended) * x.tanh(), attended.detach()

    def forward(self, x, text):
        if self.gradient_checkpointing:
            return checkpointing.checkpoint(self.body, x, text, use_reentrant=True)
        return self.body(x, text)


class Model(torch.nn.Module):
    """Blocks with skip connections around them, and a text that all of them use."""

    def __init__(self, blocks=4):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.adapters = torch.nn.ModuleList(adapt(block.inner) for block in self.blocks)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, text):
        skips = []
        for block in self.blocks:
            skips.append(x)
            x, _ = block(x, text)
        return sum(skip * (number + 1) for number, skip in enumerate(skips)) + x * self.scale


def step(model, x, text, checkpointed, bf16=False):
    for block in model.blocks:
        block.gradient_checkpointing = checkpointed
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    x, text = x.detach().requires_grad_(x.requires_grad), text.detach().requires_grad_(text.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(x * 1, text * 1).float().square().mean()
    loss.backward()
    weights = [weight.grad.clone() for weight in model.parameters() if weight.requires_grad]
    return [loss.detach(), *weights, *(tensor.grad for tensor in (x, text) if tensor.requires_grad), torch.rand(1)]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("trained", [(), ("x",), ("text",), ("x", "text")], ids=["weights", "x", "text", "both"])
def test_gradients_are_bit_identical_to_those_without_checkpointing(patched, bf16, trained):
    torch.manual_seed(0)
    model = Model().train()
    x, text = (torch.randn(3, 5, WIDTH, requires_grad=name in trained) for name in ("x", "text"))
    for _ in range(2):  # the first recomputation searches the graph, the second follows the paths
        expected, actual = (step(model, x, text, checkpointed, bf16) for checkpointed in (False, True))
        assert len(actual) == len(expected) == 6 + len(trained) + 1
        for ours, theirs in zip(actual, expected, strict=True):
            assert torch.equal(ours, theirs)


def test_upstreams_function_loses_the_gradients_that_the_patch_keeps():
    torch.manual_seed(0)
    model = Model().train()
    for block in model.blocks:
        block.gradient_checkpointing = True
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        model(torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)).sum().backward()
    assert all(weight.grad is None for weight in model.adapters.parameters())


def test_every_use_of_an_input_counts_beyond_those_passed_separately(patched):
    class Reused(torch.nn.Module):
        def forward(self, x):
            return functools.reduce(lambda total, number: total + x.sin() * number, range(1, 14), x)

    block, x = Reused(), torch.randn(7, requires_grad=True)
    checkpointing.checkpoint(block.forward, x, use_reentrant=True).sum().backward()
    torch.testing.assert_close(x.grad, 1 + x.detach().cos() * 91)


def test_an_input_that_is_returned_as_it_is_keeps_its_gradient(patched):
    block = Block()
    block.body = lambda x: (x.sin(), x)
    x = torch.randn(7, requires_grad=True)
    outputs = checkpointing.checkpoint(lambda x: block.body(x), x * 1, use_reentrant=True)
    sum(output.sum() for output in outputs).backward()
    torch.testing.assert_close(x.grad, x.detach().cos() + 1)


def test_a_block_whose_graph_changes_keeps_every_gradient(patched):
    """Module dropout: some layers are left out at random, in forward as in the recomputation."""
    torch.manual_seed(0)
    model = Model(1).train()
    (block,) = model.blocks
    body, used = block.body, []

    def sometimes(x, text):
        return body(x, text) if used[-1] else (x * 2, x)

    block.body = sometimes
    x, text = torch.randn(3, 5, WIDTH, requires_grad=True), torch.randn(3, 5, WIDTH, requires_grad=True)
    for seed in range(8):
        used.append(random.Random(seed).random() < 0.5)
        gradients = []
        for checkpointed in (False, True):
            block.gradient_checkpointing = checkpointed
            model.zero_grad(set_to_none=True)
            x.grad = text.grad = None
            torch.manual_seed(seed)
            model(x, text).square().mean().backward()
            gradients.append(
                [None if leaf.grad is None else leaf.grad.clone() for leaf in (x, text, *model.adapters.parameters())]
            )
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    assert len(set(used)) == 2


def test_a_weight_that_no_module_of_the_block_refers_to_gets_its_gradient(patched):
    weight = torch.nn.Parameter(torch.ones(4))
    calls = []

    class Hidden(torch.nn.Module):
        def forward(self, x):
            return x * HIDDEN[0] * 3

    HIDDEN = [weight]  # noqa: N806
    block = Hidden()
    weight.register_post_accumulate_grad_hook(calls.append)
    for _ in range(3):
        weight.grad = None
        x = torch.arange(4.0, requires_grad=True)
        checkpointing.checkpoint(block.forward, x, use_reentrant=True).sum().backward()
        assert torch.equal(weight.grad, torch.arange(4.0) * 3)
        assert torch.equal(x.grad, torch.full((4,), 3.0))
    assert len(calls) == 3


def test_no_tensor_is_alive_after_backward(patched):
    torch.manual_seed(0)
    model, x, text = Model().train(), torch.randn(3, 5, WIDTH, requires_grad=True), torch.randn(3, 5, WIDTH, requires_grad=True)
    for block in model.blocks:
        block.gradient_checkpointing = True
    alive = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            model.zero_grad(set_to_none=True)
            x.grad = text.grad = None
            with Allocations() as allocations:
                model(x, text).square().mean().backward()
            alive.append(allocations.alive)
    finally:
        gc.enable()
    assert all(after == before for before, after in pairwise(alive[1:])), alive
    gradients = sum(leaf.grad.untyped_storage().nbytes() for leaf in (x, text, *model.parameters()) if leaf.grad is not None)
    assert alive[-1] <= gradients


def test_gradients_accumulate_once_per_weight_and_step(patched):
    """Hooks of a weight, as DistributedDataParallel and the fused backward pass use, run once."""
    model, x, text = Model().train(), torch.randn(3, 5, WIDTH), torch.randn(3, 5, WIDTH)
    calls = []
    for weight in model.adapters.parameters():
        weight.register_post_accumulate_grad_hook(lambda weight: calls.append(id(weight)))
    step(model, x, text, checkpointed=True)
    assert sorted(calls) == sorted(id(weight) for weight in model.adapters.parameters())


def test_compiled_blocks_keep_torchs_non_reentrant_checkpointing(tmp_path, monkeypatch):
    patcher = Patcher({PATCH.name: PATCH}, Settings(selective_torch_compile=True), Checkout(tmp_path, None, "v0.11", "test"))
    patcher.arm()
    kinds = []
    original = checkpointing.checkpoint
    spy = lambda *args, **kwargs: kinds.append(kwargs["use_reentrant"]) or original(*args, **kwargs)  # noqa: E731
    try:
        monkeypatch.setattr(checkpointing, "checkpoint", spy)
        block = Block().train()
        original(block.body, torch.randn(2, WIDTH, requires_grad=True), torch.randn(2, WIDTH), use_reentrant=True)
    finally:
        patcher.undo()
    assert kinds == [False]
