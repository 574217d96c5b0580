"""A fine-tune with optimizer states on the host: less memory on the virtual GPU, and no further waits for it."""

import pytest

torch = pytest.importorskip("torch")

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
    usual, ours = (train_on_gpu(checkout, "sdxl_train.py", *OPTIONS, *more) for more in ((), ("--optimizer_states_on_host",)))
    assert "keeps its states in host memory" in ours.output
    for before, after in zip(usual.later_steps, ours.later_steps, strict=True):
        print(before, after)
        assert after.syncs == before.syncs
        assert after.own_syncs == before.own_syncs == {}
        assert after.launches == before.launches
        states = after.bytes_to_host - before.bytes_to_host
        assert states > 5e6
        assert before.bytes - after.bytes >= states
    assert ours.peak < usual.peak
    assert not ours.unknown_calls
