"""Selective compile and the memory budget in the real scripts: reached, close to eager, in one piece, and never fatal."""

import pytest

torch = pytest.importorskip("torch")

SDXL, LUMINA, FLUX = "sdxl_train_network.py", "lumina_train_network.py", "flux_train_network.py"
#: AOTAutograd with the kernels of eager: what is traced, recomputed and saved is the same, and compiling takes seconds.
ON = ("--selective_torch_compile", "--compile_backend", "aot_eager")

BLOCKS = {
    SDXL: {"BasicTransformerBlock", "ResnetBlock2D", "Downsample2D", "Upsample2D", "CLIPEncoderLayer"},
    LUMINA: {"JointTransformerBlock"},
    FLUX: {"DoubleStreamBlock", "SingleStreamBlock", "CLIPEncoderLayer"},
}


def facts(run):
    found = run.report["facts"]["selective_torch_compile"]
    blocks = {label.partition(":")[2].partition(".")[0]: block for label, block in found["blocks"].items()}
    return found, blocks


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    assert not any("_orig_mod" in name for name in ours)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance)


@pytest.mark.newest
@pytest.mark.parametrize("script", [SDXL, pytest.param(FLUX, marks=pytest.mark.slow)])
def test_training_is_close_to_upstreams_and_no_block_falls_apart(checkout, train, upstream, script):
    run = train(checkout, script, *ON)
    assert_close(run.tensors, upstream(checkout, script).tensors, 1e-5)
    found, blocks = facts(run)
    assert blocks.keys() == BLOCKS[script]
    assert found["graph_breaks"] == 0
    for block in blocks.values():
        assert block["calls"] > block["graphs"] > 0
        assert block["eager_because"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "family", "names", "more"),
    [
        (FLUX, "chroma", {"DoubleStreamBlock", "SingleStreamBlock"}, ("--train_batch_size", "2")),
        ("anima_train_network.py", "anima", {"Block"}, ()),
    ],
    ids=["chroma", "anima"],
)
def test_the_other_families_are_close_to_upstream_and_in_one_piece(checkout, train, script, family, names, more):
    run = train(checkout, script, *ON, *more, "--network_train_unet_only", family=family)
    theirs = train(checkout, script, *more, "--network_train_unet_only", start="plain", family=family)
    assert_close(run.tensors, theirs.tensors, 1e-5)
    found, blocks = facts(run)
    assert blocks.keys() == names
    assert found["graph_breaks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "arguments"),
    [("networks.lora", ["conv_dim=4"]), ("networks.lora_fa", []), ("networks.oft", [])],
    ids=["LoCon", "LoRA-FA", "OFT"],
)
def test_other_networks_are_close_to_upstream_and_in_one_piece(checkout, train, network, arguments):
    more = ("--network_module", network, *(("--network_args", *arguments) if arguments else ()))
    run = train(checkout, SDXL, *ON, *more)
    assert_close(run.tensors, train(checkout, SDXL, *more, start="plain").tensors, 1e-5)
    found, blocks = facts(run)
    assert blocks["BasicTransformerBlock"]["graphs"] > 0
    assert found["graph_breaks"] == 0


def test_pictures_of_known_sizes_add_no_graphs(checkout, train):
    """Two epochs of eight steps: every size has been seen twice in the first, and nothing is compiled in the second."""
    (block,) = facts(train(checkout, LUMINA, *ON, "--max_train_steps", "16"))[1].values()
    assert 0 < block["last_graph_at_call"] <= block["calls"] // 2
    assert block["calls"] % 16 == 0


def test_the_environment_alone_compiles_and_the_budget_goes_without_checkpointing(checkout, train, upstream):
    env = {
        "SDSCRIPTS_SELECTIVE_TORCH_COMPILE": "1",
        "SDSCRIPTS_TORCH_COMPILE_ACTIVATION_MEMORY_BUDGET": "0.5",
        "KOHYA_EXT_COMPILE_BACKEND": "aot_eager",
    }
    run = train(checkout, LUMINA, "--no-gradient_checkpointing", start="environment", env=env)
    assert_close(run.tensors, upstream(checkout, LUMINA).tensors, 1e-5)
    assert "compiled blocks keep 50% of their activations" in run.output
    assert "saves nothing with --gradient_checkpointing" not in run.output
    _, blocks = facts(run)
    assert blocks["JointTransformerBlock"]["graphs"] > 0


def test_without_a_compiler_training_is_upstreams_to_the_bit(checkout, train, upstream):
    """Also what is said of a budget beside checkpointing."""
    on = ("--selective_torch_compile", "--activation_memory_budget", "0.5")
    run = train(checkout, LUMINA, *on, env={"CXX": "no-such-compiler"}, bare=True)  # torch reads CXX when it is imported
    assert_close(run.tensors, upstream(checkout, LUMINA).tensors, 0)
    assert "selective compile is off: no working C++ compiler" in run.output
    assert "--activation_memory_budget 0.5 saves nothing with --gradient_checkpointing" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "said", "tolerance"),
    [
        ("torch", "selective compile is off: torch 2.4.1 is too old for it", 0),
        ("layout", "does not know this library.lumina_models:JointTransformerBlock._forward: it is not there", 0),
    ],
)
def test_what_breaks_costs_nothing_but_speed(checkout, train, upstream, broken, said, tolerance):
    run = train(checkout, LUMINA, *ON, env={"BREAK": broken})
    assert_close(run.tensors, upstream(checkout, LUMINA).tensors, tolerance)
    assert run.output.count(said) == 1


@pytest.mark.slow
def test_it_stands_aside_where_the_whole_model_is_compiled(checkout, train):
    run = train(checkout, LUMINA, *ON, "--torch_compile", "--dynamo_backend", "eager", "--max_train_steps", "1")
    assert run.code == 0, run.output[-4000:]
    assert "--torch_compile compiles the whole model already" in run.output
    found, blocks = facts(run)
    assert found["standing_aside"]
    assert blocks == {}


@pytest.mark.slow
def test_inductor_is_as_close_as_its_own_arithmetic(checkout, train, upstream):
    run = train(checkout, LUMINA, "--selective_torch_compile")
    assert_close(run.tensors, upstream(checkout, LUMINA).tensors, 1e-4)
    found, blocks = facts(run)
    assert found["graph_breaks"] == 0
    assert blocks["JointTransformerBlock"]["backward_graphs"] > 0


def test_cuda_graphs_are_refused_before_anything_is_loaded(checkout, train):
    run = train(checkout, LUMINA, "--selective_torch_compile", "--compile_mode", "reduce-overhead")
    assert run.code == 2
    assert "--compile_mode reduce-overhead cannot be used with --selective_torch_compile" in run.output
