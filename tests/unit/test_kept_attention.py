"""Attention that checkpointed blocks keep: the same bits, computed once."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import fast_checkpoint_hooks, kept_attention, nonreentrant_checkpointing  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as attend  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching import kept_attention as kept_results  # noqa: E402
from kohya_ext.patching.kept_attention import Store  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402
from tests.counting import recorded_operators  # noqa: E402

WIDTH, HEADS = 32, 2
FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Block(torch.nn.Module):
    """Two attentions, with arguments of PyTorch's attention."""

    def __init__(self, **arguments):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.arguments = arguments

    def forward(self, x):
        for layer in self.layers:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, **self.arguments)
            x = x + y.transpose(1, 2).flatten(2)
        return x


@pytest.fixture
def armed(tmp_path):
    """A function that turns the patches on or off."""
    patches = {
        patch.name: patch for patch in (fast_checkpoint_hooks.PATCH, kept_attention.PATCH, nonreentrant_checkpointing.PATCH)
    }
    patchers = []

    def arm(**settings):
        for patcher in patchers:
            patcher.undo()
        patcher = Patcher(patches, Settings(**settings), Checkout(tmp_path, None, "v0.11", "test"))
        patcher.arm()
        patchers.append(patcher)

    yield arm
    for patcher in reversed(patchers):
        patcher.undo()
    assert torch.nn.functional.scaled_dot_product_attention is attend


def results(block, reentrant, dtype, passes=1):
    """Return output and gradients, and how often attention was computed."""
    torch.manual_seed(1)
    x = torch.randn(2, 9, WIDTH, requires_grad=True)
    block.zero_grad()
    with recorded_operators() as operators, torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        y = checkpoint(block, x, use_reentrant=reentrant)
        for number in range(passes):
            y.float().square().sum().backward(retain_graph=number + 1 < passes)
    return [y, x.grad, *(weight.grad for weight in block.parameters())], operators.count(FORWARD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"scale": 0.5}])
def test_bits_are_the_same_and_attention_is_computed_once(armed, reentrant, dtype, arguments):
    block = Block(**arguments)
    armed()
    plain, computed = results(block, reentrant, dtype)
    armed(keep_attention=True)
    kept, computed_with_store = results(block, reentrant, dtype)
    assert (computed, computed_with_store) == (4, 2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, plain, strict=True))


def test_a_second_backward_pass_computes_again(armed):
    block = Block()
    armed()
    plain, _ = results(block, False, torch.float32, passes=2)
    armed(keep_attention=True)
    kept, computed = results(block, False, torch.float32, passes=2)
    assert computed == 2 + 2
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, plain, strict=True))


@pytest.mark.parametrize(
    "arguments", [{"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, {"dropout_p": 0.5}, {"enable_gqa": True}]
)
def test_other_attention_is_recomputed(armed, arguments):
    block = Block(**arguments)
    armed(keep_attention=True)
    kept_attention._counts.clear()
    results(block, False, torch.float32)
    assert not kept_attention._counts


@pytest.mark.parametrize("unsupported", [0, 1, 2, 3])  # calls of both attentions in forward, and in the recomputation
def test_a_kernel_that_only_one_pass_has_takes_no_result_of_another_attention(armed, monkeypatch, unsupported):
    block, kernel_of, calls = Block(), kept_results.kernel_of, iter(range(4))
    armed()
    plain, _ = results(block, True, torch.float32)
    armed(keep_attention=True)
    monkeypatch.setattr(kept_results, "kernel_of", lambda *inputs: None if next(calls) == unsupported else kernel_of(*inputs))
    kept, _ = results(block, True, torch.float32)
    assert not list(calls)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept, plain, strict=True))


def test_attention_without_a_kernel_is_not_counted(armed, monkeypatch):
    armed(keep_attention=True)
    kept_attention._counts.clear()
    monkeypatch.setattr(kept_results, "kernel_of", lambda *inputs: None)
    results(Block(), True, torch.float32)
    assert not kept_attention._counts


def test_without_checkpointing_nothing_is_kept(armed):
    armed(keep_attention=True)
    kept_attention._counts.clear()
    Block()(torch.randn(2, 9, WIDTH)).sum().backward()
    assert not kept_attention._counts


def test_results_are_freed_when_they_are_taken():
    class Kernel:
        forward = staticmethod(lambda number: (torch.full((2,), float(number)), "seed"))

    store = Store()
    with store.recorded():
        first = [store.result(Kernel, number) for number in range(2)]
    assert [result[0].data_ptr() for _, result in store.results] == [result[0].data_ptr() for result in first]
    with store.replayed():
        again = store.result(Kernel, 7)
        assert again[0].data_ptr() == first[0][0].data_ptr()
        assert [result is None for _, result in store.results] == [True, False]
        assert store.result(Kernel, 7)[1] == "seed"
        assert store.result(Kernel, 7)[0].tolist() == [7, 7], "more results than were kept are computed"


def test_a_result_of_another_kernel_is_computed_again():
    class Flash:
        forward = staticmethod(lambda: ("flash", "sums", "seed"))

    class Efficient:
        forward = staticmethod(lambda: ("efficient", "sums"))

    store = Store()
    with store.recorded():
        store.result(Flash)
    with store.replayed():
        assert store.result(Efficient) == ("efficient", "sums")
