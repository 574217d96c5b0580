"""--keep_attention with CUDA's kernels: fewer launches, on the virtual GPU."""

import pytest

torch = pytest.importorskip("torch")

#: Script -> attentions in the checkpointed blocks of its tiny model.
BLOCKS = {"sdxl_train_network.py": 34, "flux_train_network.py": 7}


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize("script", BLOCKS)
def test_attention_is_launched_once_for_each_block(checkout, train_on_gpu, script):
    options = ("--mixed_precision", "bf16", "--gradient_checkpointing", "--network_train_unet_only")
    plain, kept = (train_on_gpu(checkout, script, *options, *more) for more in ((), ("--keep_attention",)))
    assert "kept_attention" in kept.reached, kept.output
    for before, after in zip(plain.later_steps, kept.later_steps, strict=True):
        assert after.launches == before.launches - BLOCKS[script]
        assert after.syncs == before.syncs
        assert after.random_state == before.random_state
    assert not kept.unknown_calls
