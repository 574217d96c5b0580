"""--base_precision: real scripts train on an 8-bit base, close to the usual one."""

import pytest

torch = pytest.importorskip("torch")

SCRIPTS = ("sdxl_train_network.py", "train_network.py", "flux_train_network.py")


def _trained(run):
    return torch.cat([tensor.flatten() for name, tensor in sorted(run.tensors.items()) if "lora_up" in name])


@pytest.mark.newest
@pytest.mark.parametrize("script", SCRIPTS)
def test_trained_lora_is_close_to_that_of_the_usual_base(checkout, train, upstream, script):
    """AdamW turns errors of small gradients into whole steps, so the tolerance is wider than that of a gradient."""
    run = train(checkout, script, "--base_precision", "int8")
    actual, expected = _trained(run), _trained(upstream(checkout, script))
    assert 0 < (actual - expected).norm() < 0.2 * expected.norm()
    facts = run.report["facts"]["base_precision"]
    assert facts["layers"] > 40
    assert facts["bytes"] < 0.3 * facts["bytes_before"]  # from fp32
    assert "frozen linear layers in 8 bits" in run.output


@pytest.mark.parametrize(
    ("script", "preset"), [("sdxl_train_network.py", "8gb-int8"), ("flux_train_network.py", "flux-lora/24gb-int8")]
)
def test_presets_with_an_8_bit_base_train(checkout, train, script, preset):
    """As `plan` prints them, with the tiny model's own arguments."""
    run = train(checkout, script, "--preset", preset)
    assert run.code == 0, run.output[-4000:]
    assert run.report["facts"]["base_precision"]["layers"] > 40
    assert "gradient checkpointing covers" in run.output


@pytest.mark.only("v0.11")
def test_refusal_precedes_loading(checkout, train):
    run = train(checkout, "sdxl_train_network.py", "--base_precision", "int8", "--fp8_base", "--mixed_precision", "bf16")
    assert run.code == 2
    assert "--base_precision int8: --fp8_base changes the base too; remove one of the two" in run.output
    assert "base precision:" not in run.output
