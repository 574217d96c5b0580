"""mapped_weights: text encoders whose outputs are cached come back to the host as the file's tensors."""

import json

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

CACHED = ("--mixed_precision", "bf16", "--cache_text_encoder_outputs", "--network_train_unet_only")


@pytest.mark.parametrize("script", ["sdxl_train_network.py", "flux_train_network.py"])
def test_text_encoders_return_without_a_copy(checkout, train_on_gpu, tmp_path, script):
    report = tmp_path / "report.json"
    run = train_on_gpu(checkout, script, *CACHED, env={"KOHYA_EXT_REPORT": str(report)})
    assert run.code == 0, run.output[-3000:]
    facts = json.loads(report.read_text())["facts"]["mapped_weights"]
    assert facts["postponed"] > facts["returned"] > 0
    other = train_on_gpu(checkout, script, *CACHED, "--disable_patch", "mapped_weights")
    for step, without in zip(run.steps, other.steps, strict=True):
        assert (step.bytes, step.launches, step.syncs) == (without.bytes, without.launches, without.syncs)
    assert run.peak == other.peak
