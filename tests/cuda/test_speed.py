"""--speed on the virtual GPU: its self-test, its trial, and what a run then launches."""

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


@pytest.mark.newest
def test_default_is_exact(checkout, train_on_gpu, tmp_path):
    run = train_on_gpu(checkout, LORA, *BF16, env={"KOHYA_EXT_CACHE": str(tmp_path)})
    assert run.code == 0, run.output[-4000:]
    assert [line for line in run.output.splitlines() if "speed: " in line] == [
        "kohya_ext: speed: testing the NVIDIA GeForce RTX 4090, once for this driver and PyTorch"
    ]
    assert run.steps[-1].launches_in_graphs > 0
    assert "patches/fused_operations.py" not in run.reached
