"""HunyuanImage trains alike with text encoder outputs cached in memory and on disk."""

import pytest

torch = pytest.importorskip("torch")

SCRIPT = "hunyuan_image_train_network.py"


@pytest.mark.slow
def test_training_from_memory_equals_training_from_disk(checkout, train):
    memory = ("--cache_text_encoder_outputs", "--no-cache_text_encoder_outputs_to_disk")
    run = train(checkout, SCRIPT, *memory, env={"SPY_LOSSES": "1"})
    disk = train(checkout, SCRIPT, start="plain", env={"SPY_LOSSES": "1"})
    assert run.tensors.keys() == disk.tensors.keys()
    assert all(torch.equal(tensor, disk.tensors[name]) for name, tensor in run.tensors.items())
    assert run.losses == disk.losses
    assert "hunyuan_cached_texts" in run.output
