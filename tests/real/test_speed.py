"""--speed in the real scripts, with CUDA graphs replaced by a replayer of operations on the CPU."""

import json

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

LORA = "sdxl_train_network.py"
BF16 = ("--mixed_precision", "bf16")
OFF, AUTO = ("--speed", "off"), ("--speed", "auto")

FUSED_BACKWARD = ("--fused_backward_pass", "--optimizer_type", "Adafactor", "--max_grad_norm", "0")

#: Script -> options. Text encoders are trained, with checkpointing and images of two sizes.
RUNS = {
    "sdxl": (LORA, (*BF16, "--gradient_accumulation_steps", "2")),
    "sd15": ("train_network.py", BF16),
    "flux": ("flux_train_network.py", BF16),
    "sd3": ("sd3_train_network.py", BF16),
    "lumina": ("lumina_train_network.py", BF16),
    "anima": ("anima_train_network.py", BF16),
    "chroma": ("flux_train_network.py", (*BF16, "--network_train_unet_only")),
    "hunyuan-image": ("hunyuan_image_train_network.py", ()),  # upstream mixes precisions, which a CPU refuses in bf16
    "finetune": ("sdxl_train.py", (*BF16, "--full_bf16")),
    "fused-backward": ("sdxl_train.py", (*BF16, *FUSED_BACKWARD)),
    "flux-fused-backward": ("flux_train.py", (*BF16, "--full_bf16", *FUSED_BACKWARD)),
    "released": ("sdxl_train.py", (*BF16, "--full_bf16", "--gradient_release", "--max_grad_norm", "0.5")),
    "released-on-host": ("flux_train.py", (*BF16, "--full_bf16", "--gradient_release", "--optimizer_states_on_host")),
}
DEFAULT = ("sdxl",)


@pytest.fixture
def replayed(train, tmp_path):
    """(checkout, script, options...) -> the run, in which the trial chooses the named features."""

    def run(checkout, script, *options, chooses="", env=None, **rest):
        if "output" in rest:
            rest["output"].mkdir()
        env = {"REPLAY_ON_CPU": "1", "TRIAL_CHOOSES": chooses, "KOHYA_EXT_CACHE": str(tmp_path / "cache"), **(env or {})}
        done = train(checkout, script, *options, env=env, **rest)
        assert done.code == 0, done.output[-4000:]
        return done

    return run


def equal(first, second):
    return first.tensors.keys() == second.tensors.keys() and all(
        torch.equal(first.tensors[name], second.tensors[name]) for name in second.tensors
    )


@pytest.mark.newest
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in RUNS])
def test_trial_that_chooses_eager_passes_changes_nothing(checkout, replayed, name):
    script, options = RUNS[name]
    family = {"family": name} if name == "chroma" else {}
    plain, tried = (replayed(checkout, script, *options, *more, **family) for more in (OFF, AUTO))
    assert "nothing makes them faster" in " ".join(tried.output.split())
    assert equal(tried, plain)


@pytest.mark.newest
@pytest.mark.parametrize("chosen", ["", pytest.param("fused_operations", marks=pytest.mark.slow)])
def test_trial_with_swapped_blocks_leaves_them_in_place(checkout, replayed, chosen):
    """Of upstream's swap on a CPU both copies are one tensor."""
    swapped = ("--blocks_to_swap", "2", "--one_way_block_swap")
    whole = replayed(checkout, "flux_train_network.py", *BF16, *AUTO, chooses=chosen)
    ours = replayed(checkout, "flux_train_network.py", *BF16, *AUTO, *swapped, chooses=chosen, env={"SWAP_ON_CPU": "late"})
    assert ours.report["facts"]["one_way_block_swap"]["kept_bytes"] > 0
    assert equal(ours, whole)


@pytest.mark.newest
def test_default_is_bit_identical(checkout, replayed):
    plain, default = (replayed(checkout, LORA, *BF16, "--max_train_steps", "10", *more) for more in (OFF, ()))
    assert default.report["facts"]["cuda_graphs"]["replayed"] >= 1
    assert equal(default, plain)


@pytest.mark.newest
def test_resumed_run_computes_as_the_first_part_did(checkout, replayed, tmp_path):
    options = (*BF16, "--save_state", "--save_every_n_steps", "2", "--max_train_steps", "4")
    folder = tmp_path / "fused"
    whole = replayed(checkout, LORA, *options, *AUTO, chooses="fused_operations", output=folder)
    assert "speed: fused operations: forward and backward take " in " ".join(whole.output.split())
    assert whole.report["facts"]["fused_operations"]["products"] > 0
    (state,) = folder.glob("*step00000002-state")
    assert json.loads((state / "kohya_ext_speed.json").read_text()) == {"features": ["fused_operations"]}

    resumed = replayed(checkout, LORA, *options, *AUTO, "--resume", str(state), output=tmp_path / "resumed")
    assert "forward and backward take" not in resumed.output, "it has no trial"
    assert equal(resumed, whole)

    eager = replayed(checkout, LORA, *options, *OFF, output=tmp_path / "eager")
    assert not equal(eager, whole)
    state = tmp_path / "eager" / state.name  # as saved by an earlier release
    assert not (state / "kohya_ext_speed.json").exists()
    chosen = {"chooses": "fused_operations", "output": tmp_path / "older"}
    assert equal(replayed(checkout, LORA, *options, *AUTO, "--resume", str(state), **chosen), eager)


@pytest.mark.newest
def test_choice_is_for_the_options_of_its_run_also_without_preflight(checkout, replayed):
    options = (*BF16, *AUTO, "--no-preflight")
    first, again = (replayed(checkout, LORA, *options, chooses="fused_operations") for _ in range(2))
    assert "; chosen in " in first.output
    assert ", as found on " in again.output
    assert equal(first, again)
    other = replayed(checkout, LORA, *options, "--network_alpha", "2")
    assert "; chosen in " in other.output


@pytest.mark.newest
def test_obstacles_cost_no_run(checkout, replayed, tmp_path):
    (tmp_path / "cache").write_text("a file where the cache's folder would be")
    kept = replayed(checkout, LORA, *BF16, *AUTO, chooses="fused_operations")
    assert "the choice cannot be kept" in " ".join(kept.output.split())
    failed = replayed(checkout, LORA, *BF16, *AUTO, env={"SELF_TEST_FAILS": "fused_operations"})
    text = " ".join(failed.output.split())
    assert "speed: no fused operations on this GPU: it computes wrong numbers" in text
    assert "fused operations: forward and backward take" not in text
    assert failed.report["facts"]["fused_operations"] == {}


@pytest.mark.newest
@pytest.mark.linux("a process cannot start again in its place")
def test_run_whose_gpu_is_lost_starts_again(checkout, replayed, tmp_path):
    options = (*BF16, "--max_data_loader_n_workers", "1", "--persistent_data_loader_workers")
    env = {"LOSES_GPU": "fused_operations"}
    tried = replayed(checkout, LORA, *options, *AUTO, bare=True, env=env, output=tmp_path / "tried")
    text = " ".join(tried.output.split())
    assert "CUDA error: an illegal memory access was encountered. The GPU does nothing more for this process" in text
    assert text.count("starting the run again, without fused operations") == 1
    assert "not fused operations: it has ended earlier runs on this GPU" in text
    assert equal(tried, replayed(checkout, LORA, *options, *OFF))
    again = replayed(checkout, LORA, *options, *AUTO, env=env, output=tmp_path / "again")
    assert "starting the run again" not in again.output
    assert equal(again, tried)


#: Only compiled blocks are tried, because the layers of fused operations take most of the time.
COMPILED = ("--network_dim", "4", "--max_train_steps", "4", "--no-fused_operations", "--no-cuda_graphs")

#: A backend that fails at the second graph.
BROKEN = {"BREAK": "backend", "COMPILE_BACKEND": "broken"}


@pytest.mark.newest
@pytest.mark.slow
def test_compiled_blocks_are_chosen_and_kept(checkout, replayed, tmp_path):
    options = (*BF16, *AUTO, *COMPILED, "--save_state", "--save_every_n_steps", "2")
    env = {"TRIAL_COMPILES": "1"}
    chosen = {"chooses": "selective_torch_compile", "env": env}
    first = replayed(checkout, LORA, *options, output=tmp_path / "first", **chosen)
    assert "speed: compiled blocks: forward and backward take " in " ".join(first.output.split())
    compiled = first.report["facts"]["selective_torch_compile"]
    (block,) = compiled["blocks"].values()
    assert (block["graphs"], compiled["graph_breaks"]) == (4, 0), "two kinds in two image sizes: the trial's code is used"

    again = replayed(checkout, LORA, *options, output=tmp_path / "again", **chosen)
    assert ", as found on " in again.output
    assert equal(again, first)
    (state,) = (tmp_path / "first").glob("*step00000002-state")
    resumed = replayed(checkout, LORA, *options, "--resume", str(state), output=tmp_path / "resumed", **chosen)
    assert equal(resumed, first)


@pytest.mark.newest
@pytest.mark.parametrize(
    "breaks",
    [pytest.param({}, marks=pytest.mark.slow, id="slower"), pytest.param(BROKEN, id="broken")],
)
def test_compiled_blocks_that_are_rejected_change_nothing(checkout, replayed, breaks):
    plain = replayed(checkout, LORA, *BF16, *COMPILED, *OFF)
    tried = replayed(checkout, LORA, *BF16, *COMPILED, *AUTO, env={"TRIAL_COMPILES": "1", **breaks})
    text = " ".join(tried.output.split())
    assert "nothing makes them faster" in text
    assert ("not compiled blocks: BasicTransformerBlock could not be compiled: " in text) is bool(breaks)
    assert "could not be compiled and runs eager" not in text
    assert tried.report["facts"]["selective_torch_compile"]["blocks"] == {}
    assert equal(tried, plain)
