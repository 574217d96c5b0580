"""--keep_attention: checkpointed blocks do not compute attention twice, and train the same bits."""

import pytest

torch = pytest.importorskip("torch")

#: Case -> script, further arguments. U-Nets and text encoders have one kind of checkpointing, DiTs the other.
RUNS = {
    "sdxl": ("sdxl_train_network.py",),
    "flux": ("flux_train_network.py", "--network_train_unet_only"),
    "sd15": ("train_network.py",),
    "chroma": ("flux_train_network.py", "--network_train_unet_only"),
    "lumina": ("lumina_train_network.py", "--fused_operations"),  # without masks
    "sd3": ("sd3_train_network.py",),
    "anima": ("anima_train_network.py",),
    "hunyuan-image": ("hunyuan_image_train_network.py",),
    "sdxl fine-tune": ("sdxl_train.py",),
}

FAMILIES = {"chroma": "chroma"}


@pytest.mark.newest
@pytest.mark.parametrize(
    "case", [name if name in ("sdxl", "flux") else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_real_script_trains_the_same_bits(checkout, train, case):
    script, *more = RUNS[case]
    options = ("--sdpa", "--gradient_checkpointing", *more)
    plain, kept = (train(checkout, script, *options, *flag, family=FAMILIES.get(case)) for flag in ((), ("--keep_attention",)))
    counts = kept.report["facts"]["kept_attention"]
    assert counts["kept"] == counts["recorded"] > 0
    assert "kept_attention" not in plain.report["facts"]
    assert kept.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in kept.tensors.items())
