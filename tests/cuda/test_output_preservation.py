"""--output_preservation on the virtual GPU: its peak of memory, its waits, and blocks that are swapped."""

import pytest

from kohya_ext.tiny import arguments

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.thorough, pytest.mark.newest]

OPTION = ("--output_preservation", "sks=person")
USUAL = ("--mixed_precision", "bf16", "--speed", "off")  # the self-test of --speed resets the peak
CACHED = ("--cache_text_encoder_outputs", "--network_train_unet_only")
RUNS = {
    "sdxl": ("sdxl_train_network.py", USUAL),
    "sdxl, without checkpointing": ("sdxl_train_network.py", (*USUAL, "--no-gradient_checkpointing")),
    "flux, cached": ("flux_train_network.py", (*USUAL, *CACHED)),
    "flux, swapped": ("flux_train_network.py", (*USUAL, *CACHED, "--blocks_to_swap", "2")),
}

_OF_TEXTS = 2**17
"""Bytes of the class captions' token ids or outputs, and of predictions."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if "," in name else ()) for name in RUNS])
def test_one_graph_is_alive_at_a_time(checkout, train_on_gpu, name):
    """The LoRA's gradients exist during the forward pass, as in the second micro-batch of gradient accumulation."""
    from safetensors.torch import load_file

    script, options = RUNS[name]
    without, ours = train_on_gpu(checkout, script, *options), train_on_gpu(checkout, script, *options, *OPTION)
    assert "output_preservation" in ours.reached
    assert ours.unknown_calls == {}
    gradients = sum(tensor.numel() * 4 for tensor in load_file(ours.folder / f"{arguments.OUTPUT_NAME}.safetensors").values())
    assert ours.peak <= without.peak + gradients + _OF_TEXTS
    for with_it, usual in zip(ours.later_steps, without.later_steps, strict=True):
        assert with_it.random_state == usual.random_state
        assert with_it.own_syncs == usual.own_syncs
        assert with_it.launches > 2 * usual.launches
