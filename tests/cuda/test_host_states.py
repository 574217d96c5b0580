"""A fine-tune with optimizer states on the host: less memory on the virtual GPU, and no further waits for it.

Fine-tunes with swapped blocks resume, whose weights are on the host while their states are loaded.
"""

import pytest

torch = pytest.importorskip("torch")

ON_HOST = "--optimizer_states_on_host"

OPTIONS = (
    "--mixed_precision",
    "bf16",
    "--full_bf16",
    "--optimizer_type",
    "AdamW",
    "--max_grad_norm",
    "0",
    "--gradient_release",
)


@pytest.mark.thorough
@pytest.mark.newest
def test_states_on_the_host_take_no_memory_of_the_gpu_between_steps(checkout, train_on_gpu):
    usual, half, ours = (
        train_on_gpu(checkout, "sdxl_train.py", *OPTIONS, *more)
        for more in ((), (ON_HOST, "--optimizer_states_on_host_ratio", "0.5"), (ON_HOST,))
    )
    assert "keeps its states in host memory" in ours.output
    assert "keeps about 50% of its states in host memory" in half.output
    for before, between, after in zip(usual.later_steps, half.later_steps, ours.later_steps, strict=True):
        for each in (between, after):
            assert each.syncs == before.syncs
            assert each.own_syncs == before.own_syncs == {}
            assert each.launches == before.launches
            states = each.bytes_to_host - before.bytes_to_host
            assert states > 2e6
            assert before.bytes - each.bytes >= states
        assert between.bytes_to_host - before.bytes_to_host == pytest.approx(states / 2, rel=0.05)
    assert ours.peak < half.peak < usual.peak
    assert not ours.unknown_calls


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize(
    "more",
    [
        ("--no-stochastic_rounding",),
        ("--optimizer_args", "fused=True"),
        ("--optimizer_type", "AdamW8bit"),
        ("--optimizer_type", "AdamW8bit", "--optimizer_states_on_host"),
    ],
    ids=" ".join,
)
def test_a_run_with_swapped_blocks_resumes(checkout, train_on_gpu, more):
    options = (*OPTIONS, "--blocks_to_swap", "2", *more)
    run = train_on_gpu(checkout, "flux_train.py", *options, "--save_state", "--save_every_n_steps", "2")
    assert run.code == 0, run.output[-4000:]
    resumed = train_on_gpu(checkout, "flux_train.py", *options, "--resume", str(run.folder / "tiny-step00000002-state"))
    assert resumed.code == 0, resumed.output[-4000:]
    assert "finished at step 4" in resumed.output
