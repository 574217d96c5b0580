"""Swapped blocks of a frozen model: half of the copies, fewer waits, and the memory of upstream's swap, on the virtual GPU."""

import pytest

torch = pytest.importorskip("torch")

SCRIPTS = {
    "flux_train_network.py": "2",
    "anima_train_network.py": "1",
    "lumina_train_network.py": "1",
    "hunyuan_image_train_network.py": "2",
}


@pytest.mark.thorough
@pytest.mark.newest
@pytest.mark.parametrize("script", [pytest.param(each, marks=() if "flux" in each else pytest.mark.slow) for each in SCRIPTS])
def test_blocks_are_copied_in_one_direction(checkout, train_on_gpu, script):
    options = ("--mixed_precision", "bf16", "--blocks_to_swap", SCRIPTS[script])
    both, ours = (train_on_gpu(checkout, script, *options, *more) for more in (("--no-one_way_block_swap",), ()))
    assert "one_way_block_swap" not in both.reached
    assert "one_way_block_swap" in ours.reached, ours.output
    for before, after in zip(both.later_steps, ours.later_steps, strict=True):
        print(script, before, after)
        assert after.bytes_to_device == before.bytes_to_device
        assert after.bytes_to_host < before.bytes_to_host / 100
        assert after.syncs < before.syncs
        assert after.launches == before.launches
        assert after.bytes == before.bytes
    assert ours.peak == both.peak
    assert not ours.unknown_calls
