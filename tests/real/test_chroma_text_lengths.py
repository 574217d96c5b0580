"""Chroma's blocks with their text lengths read once a forward: the same bits, and nothing left to ask the GPU."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches.chroma_text_lengths import PATCH, Lengths  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

WIDTH, HEADS, PICTURE = 64, 2, 6
#: Text lengths of a batch: different, equal, and those of another size.
BATCHES = ((3, 5), (4, 4), (2, 7), (1, 6))


@pytest.fixture
def models(checkout, from_checkout):
    """Chroma's module with the patch, and its blocks' own forwards."""
    module = from_checkout("library.chroma_models")
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

    picture, text = torch.randn(batch, PICTURE, WIDTH), torch.randn(batch, longest, WIDTH)
    positions = torch.randn(batch, 1, PICTURE + longest, WIDTH // HEADS // 2, 2, 2)
    return double, single, (picture, text), positions, [[modulation(), modulation()] for _ in range(2)], modulation()


def run(module, forwards, lengths, txt_seq_len):
    double, single, (picture, text), positions, modulations, modulation = blocks_and_inputs(module, lengths)
    picture, text = forwards[0](double, img=picture, txt=text, pe=positions, distill_vec=modulations, txt_seq_len=txt_seq_len)
    both = torch.cat([picture, text], 1)
    return forwards[1](single, both, pe=positions, distill_vec=modulation, txt_seq_len=txt_seq_len)


def test_the_blocks_give_the_same_bits_and_read_the_lengths_once(models, monkeypatch):
    module, originals = models
    patched = [module.DoubleStreamBlock.forward, module.SingleStreamBlock.forward]
    expected = [run(module, originals, lengths, torch.tensor(lengths)) for lengths in BATCHES]

    def refuse(*args):
        raise AssertionError("the GPU was asked")

    for lengths, theirs in zip(BATCHES, expected, strict=True):
        seen = torch.tensor(lengths)
        numbers = Lengths(seen)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "item", refuse)
            patch.setattr(torch.Tensor, "tolist", lambda tensor, numbers=numbers: list(numbers.numbers))
            patch.setattr(torch.Tensor, "__index__", refuse)
            assert torch.equal(run(module, patched, lengths, seen), theirs)


def test_what_else_is_asked_is_answered_by_the_tensor():
    lengths = Lengths(torch.tensor([3, 5]))
    assert torch.max(lengths).item() == 5
    assert torch.max(lengths, dim=0).indices.item() == 1
    assert torch.sum(lengths).item() == 8
    assert lengths.shape == (2,)


def test_the_blocks_are_traced_in_one_piece_whatever_the_lengths(models, compiler_patches):
    module, _ = models
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    kinds = (module.DoubleStreamBlock, module.SingleStreamBlock)
    forwards = [torch.compile(kind._forward, backend=count, fullgraph=True) for kind in kinds]

    def through_all():
        for lengths in BATCHES[::2]:  # two: what takes time is tracing
            run(module, forwards, lengths, Lengths(torch.tensor(lengths)))
        return len(graphs)

    assert through_all() == through_all() > 0
    torch._dynamo.reset()
