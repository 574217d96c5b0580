"""one_way_block_swap: training bit for bit as without swapped blocks, with copies in any order that events allow.

Upstream's own swap cannot be the reference on a CPU, where its copies are one tensor.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import one_way_block_swap  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching import page_lock  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from tests.streams import Now, Streams, to_device  # noqa: E402

BLOCKS, WIDTH = 6, 8
ORDERS = pytest.mark.parametrize("order", ["early", "late"])


class Block(torch.nn.Module):
    def __init__(self, is_last):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        if not is_last:  # as in Stable Diffusion 3
            self.third = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.second(torch.tanh(self.first(x)))
        return x + self.third(x) if hasattr(self, "third") else x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block(index == BLOCKS - 1) for index in range(BLOCKS)).requires_grad_(False)
        self.offloader = None

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if self.offloader is not None:
                self.offloader.wait_for_block(index)
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            if self.offloader is not None:
                self.offloader.submit_move_blocks(self.blocks, index)
        return x


@pytest.fixture
def swap(checkout, checkout_module, monkeypatch):
    """(model, number of blocks, order) -> the patch's swaps of the model, which is prepared as before training."""
    patcher = Patcher({"one_way_block_swap": one_way_block_swap.PATCH}, Settings(), checkout)
    patcher.arm()
    module = checkout_module("library.custom_offloading_utils")
    outcomes = [outcome for outcome in patcher.outcomes.values() if outcome.target.startswith(module.__name__)]
    assert [outcome.status for outcome in outcomes] == ["applied"] * 3, outcomes
    swaps = one_way_block_swap._Swaps(SimpleNamespace(num_processes=1))
    monkeypatch.setattr(one_way_block_swap, "current", lambda kind: swaps)

    used = []

    def make(model, count, order):
        streams = Streams(late=order == "late")
        used.append(streams)
        streams.install(monkeypatch.setattr)
        monkeypatch.setattr(module, "weighs_to_device", to_device)
        model.offloader = module.ModelOffloader(model.blocks, count, torch.device("cpu:0"))
        model.offloader.thread_pool = Now()
        model.offloader.prepare_block_devices_before_forward(model.blocks)
        return swaps, streams

    yield make
    patcher.undo()
    for streams in used:
        streams.remove()


def passes(model):
    """Return the outputs and input gradients of three passes."""
    torch.manual_seed(1)
    values = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        output = model(x)
        output.square().sum().backward()
        values += [output.detach(), x.grad]
    return values


def same(results, expected):
    return all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@ORDERS
@pytest.mark.parametrize("count", [1, 2, 4])
def test_passes_are_those_of_the_whole_model(swap, count, order):
    expected = passes(Model())
    model = Model()
    swaps, streams = swap(model, count, order)
    assert same(passes(model), expected)
    (kept,) = swaps.swaps.values()
    memory = [kept.copies[block.first] for block, _ in one_way_block_swap._swapped(model.offloader, model.blocks)]
    assert len(memory) == min(2 * count, BLOCKS)
    weight = model.blocks[0].first.weight.nbytes
    # A block arrives in forward and another in backward; the last one has a weight less.
    assert streams.copied == 3 * 2 * weight * (3 * count - 1)


@ORDERS
@pytest.mark.parametrize("count", [1, 4])
def test_sampling_rotates_blocks_and_training_continues(swap, count, order):
    whole = Model()
    model = Model()
    swap(model, count, order)
    expected = passes(whole)
    assert same(passes(model), expected)
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        reference = whole(x)
        model.offloader.set_forward_only(True)
        model.offloader.prepare_block_devices_before_forward(model.blocks)
        assert all(torch.equal(model(x), reference) for _ in range(4))
    model.offloader.set_forward_only(False)
    model.offloader.prepare_block_devices_before_forward(model.blocks)
    assert same(passes(model), expected)


@ORDERS
def test_pass_that_ended_with_an_error_leaves_nothing_behind(swap, order):
    expected = passes(Model())
    model = Model()
    _, streams = swap(model, 2, order)
    hook = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, WIDTH, requires_grad=True))
    hook.remove()
    while model.offloader.futures:  # as sampling_failures does
        model.offloader.futures.popitem()[1].result()
    model.offloader.prepare_block_devices_before_forward(model.blocks)
    assert all(stream.done == len(stream.copies) for stream in streams.others), "nothing is written to freed memory"
    assert same(passes(model), expected)


@pytest.mark.parametrize("reason", ["trained", "memory"])
def test_upstream_swaps_what_cannot_be_kept(swap, monkeypatch, capsys, reason):
    model = Model()
    if reason == "trained":
        model.blocks.requires_grad_(True)
    else:
        monkeypatch.setattr(page_lock, "SPARE", 2**60)
    swaps, _ = swap(model, 2, "early")
    assert [*swaps.swaps.values()] == [None]
    assert "copies blocks in both directions" in capsys.readouterr().err


# --- the real scripts ------------------------------------------------------------------------------------------------

#: Case -> script, swapped blocks, family of its checkpoint, and further arguments.
RUNS = {
    "flux": ("flux_train_network.py", "2", None),
    "anima": ("anima_train_network.py", "1", None),
    "lumina": ("lumina_train_network.py", "1", None),
    "chroma": ("flux_train_network.py", "2", "chroma"),
    "hunyuan": ("hunyuan_image_train_network.py", "2", None),
    "flux, accumulation": ("flux_train_network.py", "2", None, "--gradient_accumulation_steps", "2"),
    "flux, int8": ("flux_train_network.py", "2", None, "--base_precision", "int8"),
    "flux, no checkpointing": ("flux_train_network.py", "2", None, "--gradient_checkpointing_ratio", "0"),
    "flux, attention kept": ("flux_train_network.py", "2", None, "--sdpa", "--keep_attention"),
    "hunyuan, attention kept": ("hunyuan_image_train_network.py", "2", None, "--sdpa", "--keep_attention"),
    "flux, samples": ("flux_train_network.py", "2", None, "--sample_every_n_steps", "2"),
}


@ORDERS
@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "flux" else pytest.mark.slow) for case in RUNS])
def test_real_script_trains_as_without_swapped_blocks(checkout, train, tmp_path, case, order):
    script, blocks, family, *more = RUNS[case]
    if "--sample_every_n_steps" in more:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("a red circle --w 64 --h 64 --s 2 --d 1\n")
        more += ["--sample_prompts", str(prompts)]
    whole = train(checkout, script, *more, family=family)
    ours = train(checkout, script, "--blocks_to_swap", blocks, *more, family=family, env={"SWAP_ON_CPU": order})
    assert whole.code == ours.code == 0, ours.output[-4000:]
    assert ours.report["facts"]["one_way_block_swap"]["kept_bytes"] > 0
    assert ours.tensors.keys() == whole.tensors.keys()
    # Sampling moves the first blocks to other addresses, whose alignment decides how a CPU adds up a product.
    tolerance = 1e-7 if "samples" in case else 0
    assert max((tensor - whole.tensors[name]).abs().max() for name, tensor in ours.tensors.items()) <= tolerance
