"""broadcast_masks: bit-identical blocks whose attention gets a mask without heads and queries."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.broadcast_masks import PATCH  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

WIDTH, HEADS, TOKENS, IMAGE_TOKENS = 64, 2, 5, 16
MASK = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


def flux(module):
    torch.manual_seed(0)
    double = module.DoubleStreamBlock(WIDTH, HEADS, 2.0, qkv_bias=True)
    single = module.SingleStreamBlock(WIDTH, HEADS, 2.0)
    image, text = torch.randn(2, IMAGE_TOKENS, WIDTH, requires_grad=True), torch.randn(2, TOKENS, WIDTH)
    positions, condition = torch.randn(2, 1, IMAGE_TOKENS + TOKENS, WIDTH // HEADS // 2, 2, 2), torch.randn(2, WIDTH)
    mask = torch.tensor(MASK)
    outputs = double._forward(image, text, condition, positions, mask)
    return image, single._forward(torch.cat(outputs[::-1], 1), condition, positions, mask)


def lumina(module):
    torch.manual_seed(0)
    attention = module.JointAttention(WIDTH, HEADS, HEADS, qk_norm=True)
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    positions = torch.polar(torch.ones(2, TOKENS, WIDTH // HEADS // 2), torch.randn(2, TOKENS, WIDTH // HEADS // 2))
    return x, attention(x, torch.tensor(MASK), positions)


@pytest.mark.parametrize(("name", "run", "calls"), [("flux", flux, 2), ("lumina", lumina, 1)])
def test_blocks_are_bit_identical_with_a_mask_of_one_head_and_query(checkout, checkout_module, monkeypatch, name, run, calls):
    module = checkout_module(f"library.{name}_models")
    attend, shapes = torch.nn.functional.scaled_dot_product_attention, []

    def record(*args, attn_mask=None, **kwargs):
        shapes.append(tuple(attn_mask.shape))
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)

    def results():
        leaf, output = run(module)
        output.square().sum().backward()
        return output, leaf.grad

    theirs = results()
    assert all(shape[1] == HEADS and shape[2] == shape[3] for shape in shapes)
    shapes.clear()
    patcher = Patcher({PATCH.name: PATCH}, Settings(), checkout)
    patcher.arm()
    try:
        ours = results()
    finally:
        patcher.undo()
    assert [shape[:3] for shape in shapes] == [(2, 1, 1)] * calls
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
