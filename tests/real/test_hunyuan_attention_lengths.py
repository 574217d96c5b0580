"""HunyuanImage's attention with the lengths read once: the same bits, and blocks that are compiled in one piece."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.hunyuan_attention_lengths import PATCH  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

MASKS = {
    "one": [[1, 1, 1, 1, 1]],
    "equal": [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "padded": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "padded alike": [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]],
}
PICTURE = 16


@pytest.fixture
def modules(checkout, from_checkout):
    """The attention and the blocks of a checkout, patched, and the function that the patch wraps."""
    attention = from_checkout("library.attention")
    blocks = from_checkout("library.hunyuan_image_modules")
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
    rope = (torch.randn(PICTURE, 32), torch.randn(PICTURE, 32))
    return torch.randn(batch, PICTURE, 64), torch.randn(batch, length, 64), torch.randn(batch, 64), rope


@pytest.mark.parametrize("mask", MASKS)
def test_the_blocks_give_the_same_bits(modules, mask):
    params, blocks, original = modules
    mask = torch.tensor(MASKS[mask])
    double, single = blocks.MMDoubleStreamBlock(64, 2, 2.0), blocks.MMSingleStreamBlock(64, 2, 2.0)
    results = []
    for create in (original, params.create_attention_params_from_mask):
        image, text, vector, rope = inputs(mask)
        attention = create("torch", False, PICTURE, mask)
        image, text = double(image, text, vector, rope, attention)
        results.append([image, text, single(torch.cat([image, text], 1), vector, rope, attention)])
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_nothing_is_left_to_ask_the_gpu_in_a_block(modules):
    params, _, original = modules
    for name in ("one", "equal", "padded"):
        mask = torch.tensor(MASKS[name])
        assert original("torch", False, PICTURE, mask).seqlens is not None
        assert params.create_attention_params_from_mask("torch", False, PICTURE, mask).seqlens is None
    mask = torch.tensor(MASKS["padded"])
    assert params.create_attention_params_from_mask("torch", False, 0, mask).seqlens is not None, "read by the text refiner"
    assert params.create_attention_params_from_mask("torch", True, PICTURE, mask).seqlens is not None, "split by them"


def test_the_blocks_are_traced_in_one_piece_and_known_sizes_add_no_graphs(modules, compiler_patches):
    params, blocks, _ = modules
    double, single = blocks.MMDoubleStreamBlock(64, 2, 2.0), blocks.MMSingleStreamBlock(64, 2, 2.0)
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    into = [torch.compile(kind._forward, backend=count, fullgraph=True) for kind in (type(double), type(single))]

    def through_all():
        for name in ("one", "equal", "padded"):
            mask = torch.tensor(MASKS[name])
            image, text, vector, rope = inputs(mask)
            attention = params.create_attention_params_from_mask("torch", False, PICTURE, mask)
            image, text = into[0](double, image, text, vector, rope, attention)
            into[1](single, torch.cat([image, text], 1), vector, rope, attention)
        return len(graphs)

    assert through_all() == through_all() > 0
    torch._dynamo.reset()
