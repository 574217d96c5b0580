"""The activations that an activation memory budget keeps and recomputes, counted on fake tensors."""

import json

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.compiling import blocks, configuration  # noqa: E402
from kohya_ext.compiling.budget import set_budget  # noqa: E402
from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run import activation_budgets, inductor  # noqa: E402
from kohya_ext.dry_run.events import Kind, peak  # noqa: E402
from kohya_ext.dry_run.tracker import BACKWARD, FORWARD, Tracker  # noqa: E402
from kohya_ext.estimate.gpus import FP32  # noqa: E402
from kohya_ext.estimate.seconds import MEMORY  # noqa: E402
from kohya_ext.tiny import environment  # noqa: E402
from tests.fake_tensors import fake_tensors  # noqa: E402

ROWS, WIDTH = 64, 32


class Block(torch.nn.Module):
    """Two layers. Between them eager mode keeps the input and the output of the activation."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))


@pytest.fixture
def compile_block(monkeypatch, tmp_path):
    """Return a function that compiles the block."""
    monkeypatch.setattr(blocks, "RUN", blocks.Run())
    monkeypatch.setenv(configuration.CACHE_VARIABLE, str(tmp_path))

    def compile_block():
        settings = Settings(selective_torch_compile=True, compile_dynamic="false")
        monkeypatch.setattr(Block, "forward", blocks.compile_method(Block.forward, "here:Block.forward", "1 of 1", settings))

    return compile_block


def test_costs_of_eager_checkpointed_and_budgeted_blocks(compile_block):
    compile_block()
    mode = inductor.traceable()
    with fake_tensors(mode), activation_budgets.collecting(mode) as graphs:
        torch.nn.Sequential(Block(), Block(), Block())(torch.randn(ROWS, WIDTH, requires_grad=True))
    (graph,) = graphs
    assert (graph.block, graph.enters, graph.calls) == ("Block", (ROWS, WIDTH), 3)
    inner = 4 * ROWS * 4 * WIDTH  # bytes of the four times wider tensor, in float32
    product = 2 * ROWS * WIDTH * 4 * WIDTH  # FLOPs of one layer
    assert graph.eager == activation_budgets.Cost(2 * inner, 6 * product)
    assert graph.checkpointed == activation_budgets.Cost(0, 7 * product), "the second layer must not be recomputed"
    # 1: the same as eager. 0.75, 0.5: the activation is recomputed, at no FLOPs. Below 0.5: the first layer is recomputed too.
    costs = {budget: (cost.kept // inner, cost.flops // product) for budget, cost in graph.budgets.items()}
    assert costs == {1.0: (2, 6), 0.75: (1, 6), 0.5: (1, 6), 0.25: (0, 7), 0.1: (0, 7), 0.0: (0, 7)}
    assert activation_budgets.total(graphs, lambda graph: graph.eager) == activation_budgets.Cost(6 * inner, 18 * product)


@pytest.mark.parametrize(("budget", "kept", "held"), [(1.0, 1, 2), (0.0, 0, 1)])
def test_the_estimated_peak_equals_a_compiled_steps(compile_block, budget, kept, held):
    compile_block()
    set_budget(budget)
    mode, tracker = inductor.traceable(), Tracker()
    with fake_tensors(mode), inductor.logging_to(tracker):
        model, x = torch.nn.Sequential(Block(), Block()), torch.randn(ROWS, WIDTH, requires_grad=True)
        model.requires_grad_(False)  # then backward needs only the input of the activation
        model(x).sum().backward()
        with tracker:
            tracker.mark([x, x.grad, *model.parameters()], Kind.WEIGHT)
            before = len(tracker.events)
            out = model(x)
            tracker.mark_saved()
            with tracker.during(BACKWARD):
                out.sum().backward()
            del out
    set_budget(1.0)
    inner = 4 * ROWS * 4 * WIDTH  # bytes of the four times wider tensor, in float32
    outer = inner // 4
    events = [event for event in tracker.events[before:] if tracker.kinds[event.storage] is not Kind.WORKSPACE]
    forward = peak([event for event in events if event.phase == FORWARD], tracker.kinds).bytes
    # First block: the kept tensors and the output. Second block: its live tensors and the output of its last layer. The
    # activation is computed in place unless its input is kept, and so is the sum.
    assert forward == kept * inner + outer + held * inner + outer
    assert sum(event.bytes for event in events) == 0, "all memory must be freed"


def test_generated_code_runs_on_fake_tensors(compile_block):
    pytest.importorskip("triton")
    compile_block()
    mode, tracker = inductor.traceable(), Tracker()
    with fake_tensors(mode), inductor.logging_to(tracker):
        model, x = Block(), torch.randn(ROWS, WIDTH, requires_grad=True)
        with tracker:
            out = model(x)
    assert out.shape == x.shape
    # Two products, gelu, and the second one's bias and the sum in its memory.
    groups = tracker.work.work().batch
    assert {kind: sum(group.count for group in groups if group.kind == kind) for kind in (FP32, MEMORY)} == {FP32: 2, MEMORY: 2}
    assert tracker.kernels == 2
    inner, outer = 4 * ROWS * 4 * WIDTH, 4 * ROWS * WIDTH
    assert sum(group.bytes for group in groups if group.kind == MEMORY) == 2 * inner + 3 * outer + 4 * WIDTH


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sdxl_train_network.py", "flux_train_network.py"])
def test_the_command_counts_every_block_of_a_real_model(checkout, call, script, tmp_path):
    module = "networks.lora" if script.startswith("sdxl") else "networks.lora_flux"
    command = ["-m", "kohya_ext", "budget", "--json", "--plot", tmp_path / "curve.png"]
    options = ["--network_module", module, "--network_dim", "4", "--network_train_unet_only", "--mixed_precision", "bf16"]
    options += ["--resolution", "256", "--cache_latents", "--cache_text_encoder_outputs", "--sdpa", "--no_half_vae"]
    done = call(*command, "--sd-scripts", checkout.path, script, *options, **environment.variables(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    total = result["total"]
    kept = [total[name]["kept"] for name in ("eager", "1", "0.5", "0.1", "0")]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0 < kept[1] < kept[0]
    assert total["checkpointing"]["flops"] >= total["0"]["flops"] > total["1"]["flops"] >= total["eager"]["flops"]
    classes = {row["class"] for row in result["blocks"]}
    assert {"BasicTransformerBlock", "ResnetBlock2D"} <= classes or classes == {"DoubleStreamBlock", "SingleStreamBlock"}
    assert (tmp_path / "curve.png").stat().st_size > 10_000
