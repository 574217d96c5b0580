"""hunyuan_attention_lengths: bit-identical blocks that do not sync and compile to one graph."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.hunyuan_attention_lengths import PATCH  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

pytestmark = pytest.mark.thorough

MASKS = {
    "single": [[1, 1, 1, 1, 1]],
    "equal": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "padded": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "padded alike": [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]],
}
IMAGE_TOKENS = 16


@pytest.fixture
def modules(checkout, checkout_module):
    """The patched attention parameters and blocks of a checkout, and the original function."""
    attention = checkout_module("library.attention")
    blocks = checkout_module("library.hunyuan_image_modules")
    original = attention.AttentionParams.create_attention_params_from_mask
    patcher = Patcher({PATCH.name: PATCH}, Settings(), checkout)
    patcher.arm()
    assert [outcome.status for outcome in patcher.outcomes.values()] == ["applied"]
    yield attention.AttentionParams, blocks, original
    patcher.undo()
    assert attention.AttentionParams.create_attention_params_from_mask is original


def inputs(mask):
    torch.manual_seed(0)
    batch, length = mask.shape
    rope = (torch.randn(IMAGE_TOKENS, 32), torch.randn(IMAGE_TOKENS, 32))
    return torch.randn(batch, IMAGE_TOKENS, 64), torch.randn(batch, length, 64), torch.randn(batch, 64), rope


@pytest.mark.parametrize("mask", MASKS)
def test_blocks_are_bit_identical(modules, mask):
    params, blocks, original = modules
    mask = torch.tensor(MASKS[mask])
    double, single = blocks.MMDoubleStreamBlock(64, 2, 2.0), blocks.MMSingleStreamBlock(64, 2, 2.0)
    results = []
    for create in (original, params.create_attention_params_from_mask):
        image, text, vector, rope = inputs(mask)
        attention = create("torch", False, IMAGE_TOKENS, mask)
        image, text = double(image, text, vector, rope, attention)
        results.append([image, text, single(torch.cat([image, text], 1), vector, rope, attention)])
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_blocks_have_no_lengths_to_read(modules):
    params, _, original = modules
    for name in ("single", "equal", "padded"):
        mask = torch.tensor(MASKS[name])
        assert original("torch", False, IMAGE_TOKENS, mask).seqlens is not None
        assert params.create_attention_params_from_mask("torch", False, IMAGE_TOKENS, mask).seqlens is None
    mask = torch.tensor(MASKS["padded"])
    assert params.create_attention_params_from_mask("torch", False, 0, mask).seqlens is not None, "the text refiner reads them"
    assert params.create_attention_params_from_mask("torch", True, IMAGE_TOKENS, mask).seqlens is not None, (
        "split attention needs them"
    )


@pytest.mark.oldest
def test_blocks_compile_to_one_graph_per_size(modules, compiler_patches):
    params, blocks, _ = modules
    double, single = blocks.MMDoubleStreamBlock(64, 2, 2.0), blocks.MMSingleStreamBlock(64, 2, 2.0)
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    forwards = [torch.compile(kind._forward, backend=count, fullgraph=True) for kind in (type(double), type(single))]

    def count_graphs():
        for name in ("single", "equal", "padded"):
            mask = torch.tensor(MASKS[name])
            image, text, vector, rope = inputs(mask)
            attention = params.create_attention_params_from_mask("torch", False, IMAGE_TOKENS, mask)
            image, text = forwards[0](double, image, text, vector, rope, attention)
            forwards[1](single, torch.cat([image, text], 1), vector, rope, attention)
        return len(graphs)

    assert count_graphs() == count_graphs() > 0
    torch._dynamo.reset()
