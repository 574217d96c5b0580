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
    assert "--keep_attention has no effect" not in kept.output
    assert kept.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(tensor, plain.tensors[name]) for name, tensor in kept.tensors.items())


#: Case -> script, default arguments to omit, further ones.
WITHOUT_EFFECT = {
    "upstream's attention": ("sdxl_train_network.py", ("--sdpa",), ()),
    "no checkpointing": ("sdxl_train_network.py", ("--gradient_checkpointing",), ()),
    "masks": ("lumina_train_network.py", (), ()),
    "upstream's checkpointing": ("anima_train_network.py", (), ("--unsloth_offload_checkpointing",)),
}


@pytest.mark.newest
@pytest.mark.parametrize(
    "case", [case if case == "no checkpointing" else pytest.param(case, marks=pytest.mark.slow) for case in WITHOUT_EFFECT]
)
def test_a_line_says_that_nothing_is_kept(checkout, train, case):
    script, without, more = WITHOUT_EFFECT[case]
    run = train(checkout, script, "--keep_attention", *more, without=without)
    assert run.code == 0, run.output[-4000:]
    assert run.output.count("--keep_attention has no effect") == 1
