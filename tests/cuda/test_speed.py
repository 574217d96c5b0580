"""--speed on the virtual GPU: its self-test, its trial, and what a run then launches."""

import json

import pytest

from tests.cuda.configurations import LORA

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

BF16 = ("--mixed_precision", "bf16", "--max_train_steps", "12")
BOTH = "cuda_graphs,fused_operations"


@pytest.mark.newest
def test_what_a_trial_chooses_is_launched_and_kept(checkout, train_on_gpu, tmp_path):
    env = {"TRIAL_CHOOSES": BOTH, "KOHYA_EXT_CACHE": str(tmp_path)}
    eager = train_on_gpu(checkout, LORA, *BF16, "--speed", "off")
    auto = ("--speed", "auto", "--no-selective_torch_compile")  # the self-test of the compiler takes half a minute
    first, second = (train_on_gpu(checkout, LORA, *BF16, *auto, env=env) for _ in range(2))
    for run in (first, second):
        assert run.code == 0, run.output[-4000:]
        assert "speed: no " not in run.output, run.output
        # The first step is eager: so are those that measure whether graphs gain, but fused.
        assert run.steps[1].launches < 0.8 * eager.steps[1].launches
        assert run.steps[-1].launches_in_graphs > 0
        assert [step.random_state for step in run.steps] == [step.random_state for step in eager.steps]
    assert second.steps[-1].bytes == first.steps[-1].bytes, "a trial leaves nothing"
    assert "speed: CUDA graphs and fused operations: forward and backward take " in first.output
    assert "; chosen in " in first.output
    assert ", as found on " in second.output
    assert first.steps[0].launches > 8 * eager.steps[0].launches > second.steps[0].launches, "the trial's own"


FUSED_BACKWARD = ("--full_bf16", "--fused_backward_pass", "--optimizer_type", "Adafactor", "--max_grad_norm", "0")

#: Script -> options of runs with swapped blocks.
SWAPPED = {
    "flux_train_network.py": ("--blocks_to_swap", "2", "--one_way_block_swap"),
    "flux_train.py": ("--blocks_to_swap", "2", *FUSED_BACKWARD),
}


@pytest.mark.newest
@pytest.mark.parametrize("script", SWAPPED)
def test_a_trial_leaves_swapped_blocks_where_steps_begin(checkout, train_on_gpu, tmp_path, script):
    options = (*BF16, *SWAPPED[script], "--no-selective_torch_compile")
    env = {"TRIAL_CHOOSES": "fused_operations", "KOHYA_EXT_CACHE": str(tmp_path)}
    forced = train_on_gpu(checkout, script, *options, "--speed", "off", "--fused_operations")
    tried = train_on_gpu(checkout, script, *options, "--speed", "auto", env=env)
    assert tried.code == 0, tried.output[-4000:]
    assert "speed: fused operations: forward and backward take " in tried.output
    assert "--one_way_block_swap" not in options or "one_way_block_swap" in tried.reached
    for ours, reference in zip(tried.later_steps, forced.later_steps, strict=True):
        assert (ours.launches, ours.bytes_to_host) == (reference.launches, reference.bytes_to_host)
        # Tables of positions, which the trial has made, and which are copied with two waits.
        assert abs(ours.bytes - reference.bytes) <= 1024
        assert 0 <= reference.bytes_to_device - ours.bytes_to_device <= 1024
        assert reference.syncs - ours.syncs in (0, 2)


@pytest.mark.newest
def test_default_is_exact(checkout, train_on_gpu, tmp_path):
    run = train_on_gpu(checkout, LORA, *BF16, env={"KOHYA_EXT_CACHE": str(tmp_path)})
    assert run.code == 0, run.output[-4000:]
    assert [line for line in run.output.splitlines() if "speed: " in line] == [
        "kohya_ext: speed: testing the NVIDIA GeForce RTX 4090, once for this driver and PyTorch"
    ]
    assert run.steps[-1].launches_in_graphs > 0
    assert "patches/fused_operations.py" not in run.reached


#: Name -> how long launches and kernels take, and the fastest features. Fused operations launch kernels of Triton.
MACHINES = {
    "slow host": (100_000, "10000", {"cuda_graphs", "fused_operations"}),
    "slow GPU": (0, "150000", {"fused_operations"}),
    "both slow": (100_000, "60000", {"cuda_graphs", "fused_operations"}),
    "slow fused kernels": (0, "triton=20000000,150000", set()),
    "slow host and fused kernels": (100_000, "triton=5000000,1000", {"cuda_graphs"}),
}


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "script"),
    [
        pytest.param(name, script, marks=[] if (name, script) == ("both slow", "flux_train_network.py") else pytest.mark.slow)
        for name in MACHINES
        for script in (LORA, "flux_train_network.py")
    ],
)
def test_what_a_trial_chooses_is_fastest_on_machines_that_differ(checkout, train_on_gpu, tmp_path, name, script):
    launch, kernels, fastest = MACHINES[name]
    machine = {"VIRTUAL_GPU_LAUNCH_NS": str(launch), "VIRTUAL_GPU_KERNEL_NS": kernels}
    # A trial times the passes of this network alone.
    options = ("--mixed_precision", "bf16", "--network_train_unet_only", "--max_train_steps")

    def seconds(features):
        forced = [f"--{name}" for name in (*features, *(["cuda_graphs_always"] if "cuda_graphs" in features else []))]
        run = train_on_gpu(checkout, script, *options, "8", "--speed", "off", *forced, env=machine)
        return min(step.seconds for step in run.steps[-4:])  # other work on the machine lengthens the others

    both = {"cuda_graphs", "fused_operations"}
    candidates = {each: seconds(each) for each in map(frozenset, ([], ["cuda_graphs"], ["fused_operations"], both))}
    env = {**machine, "TRIAL_HAS_TIME": "1", "KOHYA_EXT_CACHE": str(tmp_path)}
    tried = train_on_gpu(checkout, script, *options, "4", "--speed", "auto", "--no-selective_torch_compile", env=env)
    assert tried.code == 0, tried.output[-4000:]
    (verdict,) = [json.loads(file.read_text()) for file in (tmp_path / "speed").glob("*.json")]
    assert set(verdict["features"]) == fastest, (verdict, candidates)
    assert candidates[frozenset(fastest)] < 1.05 * min(candidates.values()), candidates
