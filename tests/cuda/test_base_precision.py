"""--base_precision on the virtual GPU: less memory, and no more waiting for the GPU."""

import pytest

from tests.cuda.configurations import Configuration

torch = pytest.importorskip("torch")


def _configuration(*options):
    # In fp16 as a default configuration, whose run of upstream this shares.
    mixed = ("--mixed_precision", "fp16")
    return Configuration("flux_train_network.py", mixed, extension_options=("--base_precision", "int8", *options))


@pytest.mark.only("v0.11")
def test_8_bit_base_needs_less_memory(checkout, train_both):
    pytest.importorskip("triton")
    pair = train_both(checkout, _configuration())
    assert "base precision: 42 frozen linear layers in 8 bits" in pair.ours.output
    assert "saves memory but no time" not in pair.ours.output
    for ours, theirs in zip(pair.ours.later_steps, pair.upstream.later_steps, strict=True):
        assert ours.bytes < theirs.bytes - 600_000  # half of the layers' 1.4 MB, less scales
        assert ours.syncs <= theirs.syncs
        assert ours.random_state == theirs.random_state  # the check of the kernels draws none
    assert pair.ours.peak < pair.upstream.peak


@pytest.mark.slow
def test_8_bit_products_are_recorded_in_cuda_graphs(checkout, train_both):
    pytest.importorskip("triton")
    pair = train_both(checkout, _configuration("--cuda_graphs", "--fused_operations"))
    assert pair.ours.steps[-1].launches_in_graphs > 1000
