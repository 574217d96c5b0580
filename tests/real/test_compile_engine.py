"""The engine behind selective compile, tested on small modules without sd-scripts."""

import copy
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

from kohya_ext.compiling import blocks, budget, configuration, support
from kohya_ext.compiling.fallback import with_fallback
from kohya_ext.compiling.inputs import Inputs, require_gradients
from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import registry

ON = Settings(selective_torch_compile=True)


class Lora(torch.nn.Module):
    """Replaces a layer's forward, as sd-scripts' networks do."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.down = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, layer.out_features, bias=False)
        self.original, layer.forward = layer.forward, self.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.original(x) + self.up(self.down(x))


def block_class() -> type[torch.nn.Module]:
    """Return a new class for each test, because compiling replaces a class attribute."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
            self.loras = [Lora(self.inner), Lora(self.outer)]

        def _forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.outer(torch.nn.functional.gelu(self.inner(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self._forward, x, use_reentrant=False)

    return Block


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler_patches: None) -> Iterator[blocks.Run]:
    """A new run, whose blocks compile in moments, with the patches that old versions of torch need. torch is reset after it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = blocks.Run(backend="aot_eager")
    monkeypatch.setattr(blocks, "RUN", run)
    monkeypatch.setenv(configuration.CACHE_VARIABLE, str(tmp_path))
    yield run
    torch._dynamo.reset()


def compiled(kind: type[torch.nn.Module], inputs: Inputs | None = None) -> blocks.Block:
    label = f"here:{kind.__name__}._forward"
    kind._forward = blocks.compile_method(kind._forward, label, "1 of 1", ON, inputs)  # type: ignore[attr-defined]
    return blocks.RUN.blocks[label]


def gradients(model: torch.nn.Sequential, *sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for size in sizes:
        model(torch.randn(1, size, 8, requires_grad=True)).pow(2).sum().backward()
    result = [parameter.grad.clone() for block in model for lora in block.loras for parameter in lora.parameters()]
    model.zero_grad()
    for block in model:
        for lora in block.loras:
            lora.zero_grad()
    return result


def pair(depth: int = 3) -> tuple[list[torch.Tensor], torch.nn.Sequential, blocks.Block]:
    """Return eager gradients for sizes 4 and 6, and the same model with its class compiled."""
    torch.manual_seed(0)
    kind = block_class()
    model = torch.nn.Sequential(*(kind() for _ in range(depth)))
    return gradients(model, 4, 6), model, compiled(kind)


def test_blocks_share_their_graphs_and_later_sizes_add_none(run: blocks.Run) -> None:
    expected, model, block = pair(depth=5)
    torch.testing.assert_close(gradients(model, 4, 6), expected)
    graphs = block.graphs
    gradients(model, 9, 4, 6, 12)
    assert block.graphs == graphs <= 4, "one graph for the first size, one for all others, each with and without a gradient"
    assert block.calls == 5 * 6 * 2, "the forward and the recompute of each block"
    assert run.breaks == 0
    assert "_orig_mod" not in "".join(model.state_dict())


def data_set_of(*sizes: tuple[int, int]) -> SimpleNamespace:
    """Return a dataset with the buckets of sd-scripts; the last bucket is empty."""
    return SimpleNamespace(bucket_manager=SimpleNamespace(resos=[*sizes, (9, 9)], buckets=[["image"]] * len(sizes) + [[]]))


@pytest.mark.parametrize(("sizes", "graphs"), [([(64, 64)], 2), ([(64, 64), (64, 96)], 1)])
def test_known_sizes_need_one_graph(run: blocks.Run, sizes: list[tuple[int, int]], graphs: int) -> None:
    torch.manual_seed(0)
    kind = block_class()
    model = torch.nn.Sequential(*(kind() for _ in range(3)))
    expected = gradients(model, 4, 6, 9)
    run.data_sets = lambda: [data_set_of(*sizes)]
    block = compiled(kind, Inputs({"x": (1,)}))
    torch.testing.assert_close(gradients(model, 4, 6, 9), expected)
    assert block.graphs == graphs, "dynamo alone compiles a second graph at the second size"


@pytest.mark.parametrize("unified", [True, False])
def test_the_first_block_shares_the_graph_of_the_others(run: blocks.Run, unified: bool) -> None:
    """Its input requires no gradient. Requiring one does not change the gradients of the weights."""
    torch.manual_seed(0)
    kind = block_class()
    model = torch.nn.Sequential(*(kind() for _ in range(3)))
    x = torch.randn(8, 1, 4).transpose(0, 2)  # a slice, whose strides differ from those of a block's output

    def step() -> list[torch.Tensor]:
        model(x).pow(2).sum().backward()
        return [parameter.grad.clone() for block in model for lora in block.loras for parameter in lora.parameters()]

    expected = step()
    for block in model:
        for lora in block.loras:
            lora.zero_grad()
    block = compiled(kind, Inputs(activations=("x",) if unified else ()))
    torch.testing.assert_close(step(), expected)
    assert block.graphs == (1 if unified else 2)
    assert x.grad is None
    assert not x.requires_grad


def test_a_first_blocks_input_is_freed_while_the_loss_exists(run: blocks.Run) -> None:
    block, x = block_class()(), torch.ones(1, 4, 8)
    x = require_gradients(Inputs(activations=("x",)), block, {"x": x})["x"]
    loss = block(x).sum()
    loss.backward()
    assert x.requires_grad
    assert x.grad is None
    freed = weakref.ref(x)
    del x
    assert freed() is None
    assert loss.grad_fn is not None


def test_frozen_blocks_have_no_backward(run: blocks.Run) -> None:
    torch.manual_seed(0)
    kind = block_class()
    frozen, trained = kind(), kind()
    for module in (frozen, *frozen.loras):
        module.requires_grad_(False)
    block = compiled(kind, Inputs(activations=("x",)))
    between = frozen(torch.randn(1, 4, 8))
    trained(between).sum().backward()
    assert not between.requires_grad
    assert block.graphs == 2
    assert all(weight.grad is not None for lora in trained.loras for weight in lora.parameters())


def test_garbage_collection_is_disabled_while_compiling(run: blocks.Run) -> None:
    import gc

    enabled = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        enabled.append(gc.isenabled())
        return graph_module.forward

    run.prepare("cpu")
    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))
    assert enabled == [False]
    assert gc.isenabled()


def test_guards_are_not_timed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    import torch._dynamo.guards as guards

    timed: list[Any] = []
    monkeypatch.setattr(guards, "profile_guard_manager", lambda *about: timed.append(about) or 0.0)
    request.getfixturevalue("compiler_patches")
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    assert timed == []


def test_einops_is_one_call_in_a_graph_with_dynamic_sizes(run: blocks.Run) -> None:
    from einops import rearrange

    graphs: list[Any] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph_module.graph.nodes if node.op == "call_function"])
        return graph_module.forward

    def split_heads(x: torch.Tensor) -> torch.Tensor:
        return rearrange(x, "b n (h d) -> b h n d", h=2)

    run.prepare("cpu")
    function = torch.compile(split_heads, backend=backend, fullgraph=True)
    for length in (4, 6, 8):
        x = torch.arange(8.0 * length).reshape(1, length, 8)
        assert torch.equal(function(x), split_heads(x))
    assert graphs == [[rearrange]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=("affine", "plain"))
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_registered_group_norm_shapes_equal_torchs(
    run: blocks.Run, dtype: torch.dtype, affine: bool, memory_format: torch.memory_format
) -> None:
    from torch._subclasses import fake_impls
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    x = torch.randn(2, 8, 6, 10, dtype=dtype).to(memory_format=memory_format)
    weights = [torch.ones(8, dtype=dtype), torch.zeros(8, dtype=dtype)] if affine else [None, None]
    operation = torch.ops.aten.native_group_norm.default

    def symbolic_shapes() -> list[Any]:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fake = mode.from_tensor(x)
        assert fake._has_symbolic_sizes_strides
        inputs = [weight if weight is None else mode.from_tensor(weight, static_shapes=True) for weight in weights]
        with mode:
            outputs = operation(fake, *inputs, 2, 8, fake.shape[2] * fake.shape[3], 4, 1e-5)
        return [(list(map(int, out.shape)), list(map(int, out.stride())), out.dtype, out.device) for out in outputs]

    def real_shapes() -> list[Any]:
        outputs = operation(x, *weights, 2, 8, 60, 4, 1e-5)
        return [(list(out.shape), list(out.stride()), out.dtype, out.device) for out in outputs]

    fake_impls.FAST_OP_IMPLEMENTATIONS.pop(operation, None)
    decomposed = symbolic_shapes()
    run.prepare("cpu")
    assert operation in fake_impls.FAST_OP_IMPLEMENTATIONS
    assert symbolic_shapes() == decomposed == real_shapes()


def test_a_scaled_bf16_product_does_not_match_the_int8_pattern(run: blocks.Run) -> None:
    """A LoRA's product is scaled by ``alpha / rank``. torch 2.6 treats the number as a tensor of scales and raises."""
    with_fallback("inductor", None, SimpleNamespace())
    from torch._inductor.fx_passes import quantization

    number = {"x": SimpleNamespace(meta={"val": torch.empty(0)}), "scales": 0.5}
    match = SimpleNamespace(kwargs={**number, "weight": number["x"]})
    assert quantization._is_valid_woq_optimization_pattern()(match) is False


def test_nothing_is_compiled_without_gradients(run: blocks.Run) -> None:
    _, model, block = pair()
    with torch.no_grad():
        model(torch.zeros(1, 4, 8))
    assert block.calls == 0
    assert not run.prepared


def test_preparing_draws_no_random_numbers(run: blocks.Run) -> None:
    """Otherwise compiling would change the noise of a training run."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    run.prepare("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_apply_to_later_threads(run: blocks.Run) -> None:
    import torch._dynamo.config as dynamo

    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    run.prepare("cpu")
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(getattr(dynamo, name)))
    thread.start()
    thread.join()
    assert seen == [getattr(dynamo, name)] == [configuration.RECOMPILE_LIMIT]


def test_patches_remove_graph_breaks(compiler_patches: None) -> None:
    probes = {target.needed for patch in registry().values() for target in patch.targets} - {None}
    assert len(probes) == 2
    assert [probe for probe in probes if probe is not None and probe()] == []


def test_a_backend_that_raises_leaves_the_class_eager(
    run: blocks.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = []

    def broken(graph_module: Any, inputs: Any) -> Any:
        attempts.append(graph_module)
        raise RuntimeError("no such instruction\nsecond line")

    monkeypatch.setattr("kohya_ext.compiling.fallback._lookup", lambda name: broken)
    expected, model, block = pair()
    torch.testing.assert_close(gradients(model, 4, 6), expected, rtol=0, atol=0)
    assert len(attempts) == 1, "no second attempt"
    assert block.eager_because == "RuntimeError: no such instruction"
    assert capsys.readouterr().err.count("Block could not be compiled and runs eager: RuntimeError: no such instruction") == 1


def test_a_backend_that_fails_later_keeps_its_compiled_graphs(run: blocks.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second size fails. Recomputes of the first size still use its compiled graph."""
    attempts = []
    from kohya_ext.compiling import fallback

    aot_eager = fallback._lookup("aot_eager")

    def breaking(graph_module: Any, inputs: Any) -> Any:
        attempts.append(graph_module)
        if len(attempts) > 1:
            raise RuntimeError("out of registers")
        return aot_eager(graph_module, inputs)

    monkeypatch.setattr("kohya_ext.compiling.fallback._lookup", lambda name: breaking)
    expected, model, block = pair()
    torch.testing.assert_close(gradients(model, 4, 6), expected)
    torch.testing.assert_close(gradients(model, 4, 6), expected)
    assert block.eager_because == "RuntimeError: out of registers"
    assert len(attempts) == 2


@pytest.mark.slow
def test_a_backward_graph_that_cannot_be_compiled_is_interpreted(run: blocks.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = os.environ.get("CXX", {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++"))
    if shutil.which(compiler) is None:
        pytest.skip(f"inductor needs {compiler} to compile for a CPU")
    assert support.find_obstacle("cpu") is None
    import torch._inductor.compile_fx as inductor

    compile_inner = inductor.compile_fx_inner

    def no_backward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_backward"):
            raise RuntimeError("ptxas died")
        return compile_inner(*args, **kwargs)

    monkeypatch.setattr(inductor, "compile_fx_inner", no_backward)
    run.backend = "inductor"
    expected, model, block = pair(depth=2)
    torch.testing.assert_close(gradients(model, 4, 6), expected)
    assert block.eager_because == "RuntimeError: ptxas died"
    assert block.backward_graphs > 0


def test_untraceable_code_runs_eager(run: blocks.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, fullgraph=True))  # a graph break is then an error

    class Untraceable(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    layer = Untraceable(4, 4)
    x = torch.randn(2, 4)
    expected = layer(x)
    Untraceable.forward = blocks.compile_method(  # type: ignore[method-assign]
        Untraceable.forward, "here:Untraceable.forward", "1 of 1", ON
    )
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x), expected)
    block = run.blocks["here:Untraceable.forward"]
    assert block.eager
    assert block.eager_because is not None
    assert block.calls == 1, "dynamo is bypassed after the first call"


def test_an_error_of_the_block_itself_is_raised(run: blocks.Run) -> None:
    _, model, _ = pair()
    # Call the block without checkpointing, because some versions of torch do not remove its hooks after an error.
    with pytest.raises(RuntimeError, match=r"shape|size"):
        model[0]._forward(torch.zeros(1, 4, 9))


def test_an_unusable_device_is_detected_before_compiling(run: blocks.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "find_obstacle", lambda device, backend: f"Triton is not installed for {device}")
    expected, model, block = pair()
    torch.testing.assert_close(gradients(model, 4, 6), expected, rtol=0, atol=0)
    assert run.disabled_because == "Triton is not installed for cpu"
    assert block.calls == 0


def test_a_budget_counts_only_activations(run: blocks.Run) -> None:
    """With float32 weights under autocast at batch 1, torch alone keeps the same for every budget above 0."""
    layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, *copy.deepcopy(layers))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def step(share: float) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        budget.set_budget(share)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        torch.manual_seed(0)
        x = torch.randn(16, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
            out = torch.compile(model.forward, backend="aot_eager")(x)
        out.float().pow(2).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return sum(kept.values()), gradients

    try:
        bytes_kept = {share: step(share) for share in (1.0, 0.5, 0.2, 0.0)}
    finally:
        budget.set_budget(1.0)
    everything, half, little, nothing = (kept for kept, _ in bytes_kept.values())
    assert everything > half >= little > nothing, "the steps differ between versions"
    for _, actual in bytes_kept.values():
        torch.testing.assert_close(actual, bytes_kept[1.0][1])
