"""chroma_text_lengths: bit-identical blocks that read the text lengths once per forward pass, without syncs."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.chroma_text_lengths import PATCH, Lengths  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

pytestmark = pytest.mark.thorough

WIDTH, HEADS, IMAGE_TOKENS = 64, 2, 6
#: Text lengths of batches: different, equal, and with another maximum.
BATCHES = ((3, 5), (4, 4), (2, 7), (1, 6))


@pytest.fixture
def models(checkout, checkout_module):
    """Chroma's patched module, and the original forward methods of its blocks."""
    module = checkout_module("library.chroma_models")
    kinds = (module.DoubleStreamBlock, module.SingleStreamBlock)
    originals = [kind.forward for kind in kinds]
    patcher = Patcher({PATCH.name: PATCH}, Settings(), checkout)
    patcher.arm()
    assert [outcome.status for outcome in patcher.outcomes.values()] == ["applied", "applied"]
    yield module, originals
    patcher.undo()
    assert [kind.forward for kind in kinds] == originals


def blocks_and_inputs(module, lengths):
    torch.manual_seed(0)
    double, single = module.DoubleStreamBlock(WIDTH, HEADS, 2.0), module.SingleStreamBlock(WIDTH, HEADS, 2.0)
    batch, longest = len(lengths), max(lengths)

    def modulation():
        return module.ModulationOut(*torch.randn(3, batch, 1, WIDTH))

    image, text = torch.randn(batch, IMAGE_TOKENS, WIDTH), torch.randn(batch, longest, WIDTH)
    positions = torch.randn(batch, 1, IMAGE_TOKENS + longest, WIDTH // HEADS // 2, 2, 2)
    return double, single, (image, text), positions, [[modulation(), modulation()] for _ in range(2)], modulation()


def run(module, forwards, lengths, txt_seq_len):
    double, single, (image, text), positions, modulations, modulation = blocks_and_inputs(module, lengths)
    image, text = forwards[0](double, img=image, txt=text, pe=positions, distill_vec=modulations, txt_seq_len=txt_seq_len)
    both = torch.cat([image, text], 1)
    return forwards[1](single, both, pe=positions, distill_vec=modulation, txt_seq_len=txt_seq_len)


def test_blocks_are_bit_identical_and_do_not_sync(models, monkeypatch):
    module, originals = models
    patched = [module.DoubleStreamBlock.forward, module.SingleStreamBlock.forward]
    expected = [run(module, originals, lengths, torch.tensor(lengths)) for lengths in BATCHES]

    def refuse(*args):
        raise AssertionError("the CPU waited for the GPU")

    for lengths, theirs in zip(BATCHES, expected, strict=True):
        tensor = torch.tensor(lengths)
        numbers = Lengths(tensor)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", refuse)
            patch.setattr(torch.Tensor, "tolist", lambda tensor, numbers=numbers: list(numbers.numbers))
            patch.setattr(torch.Tensor, "__index__", refuse)
            assert torch.equal(run(module, patched, lengths, tensor), theirs)


def test_lengths_behave_like_a_tensor():
    lengths = Lengths(torch.tensor([3, 5]))
    assert torch.max(lengths).item() == 5
    assert torch.max(lengths, dim=0).indices.item() == 1
    assert torch.sum(lengths).item() == 8
    assert lengths.shape == (2,)


@pytest.mark.newest
def test_blocks_compile_to_one_graph_for_all_lengths(models, compiler_patches):
    module, _ = models
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    kinds = (module.DoubleStreamBlock, module.SingleStreamBlock)
    forwards = [torch.compile(kind._forward, backend=count, fullgraph=True) for kind in kinds]

    def count_graphs():
        for lengths in BATCHES[::2]:  # two are enough, because tracing is slow
            run(module, forwards, lengths, Lengths(torch.tensor(lengths)))
        return len(graphs)

    assert count_graphs() == count_graphs() > 0
    torch._dynamo.reset()
