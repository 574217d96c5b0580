"""The budget controller on invented sizes: the order in which blocks are freed, and the largest batch."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.dry_run.tracker import Allocations  # noqa: E402
from kohya_ext.gpu import budget_controller  # noqa: E402
from kohya_ext.gpu.batch_sizes import image_sizes, largest_batch, pixels_of  # noqa: E402
from kohya_ext.gpu.budget_controller import Block, BudgetController, Phase  # noqa: E402
from kohya_ext.gpu.memory_meter import HostMemoryMeter  # noqa: E402
from kohya_ext.patching.checkpointed_blocks import checkpointed_blocks  # noqa: E402

#: Two buckets with images, of which the second has half a batch.
BUCKETS = SimpleNamespace(resos=[(128, 64), (256, 256), (512, 512)], buckets=[["a"] * 8, ["b"], []])


def accelerator():
    dataset = SimpleNamespace(bucket_manager=BUCKETS, batch_size=2)
    loader = SimpleNamespace(dataset=SimpleNamespace(datasets=[dataset]))
    return SimpleNamespace(_dataloaders=[loader], sync_gradients=True)


class Reading:
    """A meter with fixed values: (held before a step, its peak)."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def begin(self):
        return self.steps[0][0]

    def end(self):
        return self.steps.pop(0)[1]

    def release(self):
        pass


def controller(limit, meter, *blocks, compile_at=None):
    """A controller that has measured (bytes kept, FLOPs) of each block with a batch of the first bucket."""
    controller = BudgetController(limit, meter, compile_at)
    controller.blocks = [Block(SimpleNamespace(gradient_checkpointing=True), *row, turn) for turn, row in enumerate(blocks)]
    controller.phase, controller._measured = Phase.FREEING, 2 * 128 * 64
    return controller


@pytest.fixture(autouse=True)
def batch(monkeypatch):
    """The current micro-batch of the training loop."""
    monkeypatch.setattr(budget_controller, "current_batch", lambda: {"images": None, "latents": torch.zeros(2, 4, 8, 16)})


def step(budget):
    budget.before_batch(accelerator())
    budget.after_batch(accelerator())


def covered(budget):
    return [block.checkpointed for block in budget.blocks]


def test_pixels_are_counted_from_latents_and_the_largest_batch_from_the_buckets():
    assert pixels_of({"images": None, "latents": torch.zeros(2, 4, 8, 16)}, accelerator()) == 2 * 128 * 64
    assert pixels_of({"latents": None, "images": torch.zeros(1, 3, 256, 256)}, accelerator()) == 256 * 256
    assert pixels_of({"latents": torch.zeros(2, 4, 9, 16)}, accelerator()) == 0
    assert largest_batch(accelerator()) == 256 * 256
    assert image_sizes(accelerator()) == {(128, 64), (256, 256)}


def test_blocks_with_the_most_flops_per_byte_are_freed_within_the_limit_of_the_largest_batch():
    # The largest batch is four times the measured one: 200 held + 4 * 50 of activations, and 600 of 1000 left.
    budget = controller(1000, Reading((200, 250), (200, 380)), (50, 10), (50, 40), (50, 30), (100, 70))
    step(budget)
    assert covered(budget) == [True, False, True, False]  # 4 * 50 and 4 * 100; the block with 0.6 FLOPs per byte does not fit
    step(budget)
    assert budget.phase is Phase.SETTLED
    assert budget.facts()["recomputed_flops"] == 40


def test_the_last_of_equal_blocks_is_freed_first():
    budget = controller(1000, Reading((200, 250)), *[(100, 10)] * 3)
    step(budget)
    assert covered(budget) == [True, True, False]


def test_waiting_blocks_are_compiled_for_the_share_that_fits():
    shares = []
    budget = controller(1000, Reading((200, 250), (200, 390)), (100, 10), (200, 10), compile_at=shares.append)
    step(budget)
    assert (shares, covered(budget), budget.phase) == ([0.5], [False, False], Phase.CHECKING)
    step(budget)
    assert (shares, covered(budget), budget.phase) == ([0.5], [False, False], Phase.SETTLED)


def test_compiled_blocks_above_the_limit_are_checkpointed_again():
    shares = []
    budget = controller(1000, Reading((200, 250), (200, 450), (200, 390)), (100, 10), (200, 10), compile_at=shares.append)
    step(budget)
    step(budget)  # 200 too much for the largest batch; the block that is cheaper to recompute frees half of 4 * 200
    assert (covered(budget), budget.phase) == ([False, True], Phase.CHECKING)
    step(budget)
    assert (shares, covered(budget), budget.phase) == ([0.5], [False, True], Phase.SETTLED)


def test_a_step_above_the_measured_one_checkpoints_blocks_permanently():
    budget = controller(1000, Reading((200, 250), (300, 480), (200, 250)), (50, 10), (50, 40), (50, 30), (100, 70))
    step(budget)
    assert covered(budget) == [True, False, True, False]
    step(budget)  # 20 too much; the block with fewer FLOPs per byte is checkpointed again
    assert covered(budget) == [True, False, True, True]
    step(budget)
    assert (covered(budget), budget.phase) == ([True, False, True, True], Phase.SETTLED)


def test_paused_blocks_are_compiled_after_measuring(capsys):
    shares = []
    step(controller(400, Reading((200, 250)), (100, 10), compile_at=shares.append))
    assert shares == [1.0]
    unknown = controller(1000, Reading((200, 250)), (100, 10), compile_at=shares.append)
    unknown._measured = 0
    step(unknown)
    assert shares == [1.0, 1.0]
    assert covered(unknown) == [True]
    assert "the batch size is not known" in capsys.readouterr().err


def test_allocations_count_new_live_storages():
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(8, 256)
    with Allocations() as scale:
        y = torch.nn.functional.linear(x, weight)
        z = y.exp()
        weight.t()[0].detach()
        z.mul_(2)
        del z
    assert (scale.peak, scale.alive, scale.flops) == (2 * 8192, 8192, 2 * 8 * 256 * 256)
    del y
    assert scale.alive == 0


def test_without_a_gpu_every_tensor_counts():
    held = torch.zeros(1_000_000, requires_grad=True)
    held.grad = torch.zeros(1_000_000)
    meter = HostMemoryMeter()
    before = meter.begin()
    assert before >= 8_000_000
    torch.zeros(500_000) + 1
    assert meter.end() - before == 4_000_000


class Stage(torch.nn.Module):
    """Like a stage of SD1.5's U-Net: one switch for all layers, each of which is checkpointed separately."""

    def __init__(self):
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)]
        self.resnets, self.attentions = (torch.nn.ModuleList([layer]) for layer in layers)
        self.gradient_checkpointing = True

    def forward(self, x):
        for layer in (*self.resnets, *self.attentions):
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.gradient_checkpointing else layer(x)
        return x


def test_a_blocks_flops_include_all_of_its_layers():
    model = torch.nn.Sequential(Stage(), Stage())
    budget = BudgetController(1000, Reading())
    budget.take(model)
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert [block.module for block in budget.blocks] == list(model)
    assert [block.turn for block in budget.blocks] == [0, 1]
    assert [(block.kept, block.flops) for block in budget.blocks] == [(2 * 4 * 4 * 8, 2 * 2 * 4 * 8 * 8)] * 2
    budget._end_measuring()
    assert not any("forward" in vars(layer) for stage in model for layer in (*stage.resnets, *stage.attentions))
    model[0].gradient_checkpointing = False
    assert checkpointed_blocks(model) == [model[1]]
