"""--base_precision: real scripts train on an 8-bit base, close to the usual one."""

import copy

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.quantization import convolution, selection  # noqa: E402

pytestmark = pytest.mark.thorough

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
    "options", [(), ("--network_args", "conv_dim=4"), ("--gradient_checkpointing", "--mixed_precision", "bf16")]
)
def test_8_bit_convolutions_train_a_lora_close_to_the_usual_one(checkout, train, options):
    script = "sdxl_train_network.py"
    usual = train(checkout, script, *options)
    run = train(checkout, script, *options, "--base_precision", "int8", "--int8_convolutions")
    facts = run.report["facts"]["base_precision"]
    assert facts["convolutions"] > 5
    assert facts["convolution_bytes"] < 0.3 * facts["convolution_bytes_before"]  # from fp32
    assert f"{facts['convolutions']} convolutions in 8 bits" in run.output
    actual, expected = _trained(run), _trained(usual)
    assert 0 < (actual - expected).norm() < 0.25 * expected.norm()
    assert any("resnets" in name or "in_layers" in name for name in run.tensors) == (options[:1] == ("--network_args",))


def _lora_gradients(unet, networks, convert):
    """Return the output of an SD 1.5 U-Net with a LoRA of its convolutions, and the gradients of the LoRA's weights."""
    if convert is not None:
        convert(unet)
    torch.manual_seed(1)
    network = networks.create_network(1.0, 4, 1.0, None, [], unet, conv_dim=4, conv_alpha=1)
    network.apply_to([], unet, apply_text_encoder=False, apply_unet=True)
    for lora in network.unet_loras:
        torch.nn.init.normal_(lora.lora_up.weight, std=0.02)
    y = unet(torch.randn(2, 4, 8, 16), torch.tensor([7, 300]), torch.randn(2, 5, 64)).sample
    y.backward(torch.randn_like(y))
    assert any(lora.lora_down.weight.ndim == 4 and lora.lora_down.kernel_size == (3, 3) for lora in network.unet_loras)
    return [y.detach(), torch.cat([weight.grad.flatten() for weight in network.parameters()])]


def test_8_bit_convolutions_of_sd15_are_close_under_a_lora(checkout_module, monkeypatch):
    """The tiny SD 1.5 has too few channels for them."""
    unets, networks = checkout_module("library.original_unet"), checkout_module("networks.lora")
    widths = {"BLOCK_OUT_CHANNELS": (64, 64, 128, 128), "TIMESTEP_INPUT_DIM": 64, "TIME_EMBED_DIM": 256}
    for name, value in widths.items():
        monkeypatch.setattr(unets, name, value)
    torch.manual_seed(0)
    usual = unets.UNet2DConditionModel(8, 8, 64, False, False).requires_grad_(False)
    unet = copy.deepcopy(usual)
    converted = []

    def convert(model):
        for name, layer in selection.convolutions(model):
            convolution.convert(layer, "operations", "cpu")
            converted.append(name)

    expected, actual = _lora_gradients(usual, networks, None), _lora_gradients(unet, networks, convert)
    assert len(converted) == 47  # two of each ResNet block, and upsamplers
    for ours, theirs in zip(actual, expected, strict=True):
        assert 0 < (ours - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.parametrize(
    ("script", "preset"), [("sdxl_train_network.py", "8gb-int8"), ("flux_train_network.py", "flux-lora/24gb-int8")]
)
def test_presets_with_an_8_bit_base_train(checkout, train, script, preset):
    """As `plan` prints them, with the tiny model's own arguments."""
    run = train(checkout, script, "--preset", preset)
    assert run.code == 0, run.output[-4000:]
    assert run.report["facts"]["base_precision"]["layers"] > 40
    assert "gradient checkpointing covers" in run.output


FAMILIES = ("train_network.py", "sd3_train_network.py", "lumina_train_network.py", "anima_train_network.py")


@pytest.mark.parametrize(
    "script",
    [
        "sdxl_train_network.py",
        "flux_train_network.py",
        *(pytest.param(script, marks=pytest.mark.slow) for script in FAMILIES),
    ],
)
def test_text_encoders_that_stay_are_in_8_bits(checkout, train, script):
    """Their rounding changes the LoRA a little more than that of the model alone."""
    usual, run = (train(checkout, script, "--network_train_unet_only", *words) for words in ((), ("--base_precision", "int8")))
    facts = run.report["facts"]["base_precision"]
    assert facts["text_layers"] > 5
    assert facts["text_bytes"] < 0.35 * facts["text_bytes_before"]  # from fp32
    actual, expected = _trained(run), _trained(usual)
    assert 0 < (actual - expected).norm() < 0.25 * expected.norm()


@pytest.mark.only("v0.11")
def test_text_encoders_that_leave_the_gpu_stay_as_they_are(checkout, train):
    words = ("--network_train_unet_only", "--cache_text_encoder_outputs", "--base_precision", "int8")
    run = train(checkout, "sdxl_train_network.py", *words)
    assert run.report["facts"]["base_precision"].keys() & {"layers", "text_layers"} == {"layers"}


@pytest.mark.parametrize(
    ("script", "precision"),
    [
        ("sdxl_train_network.py", "int8"),
        ("flux_train_network.py", "fp8"),
        *(pytest.param(script, "int8", marks=pytest.mark.slow) for script in FAMILIES),
        pytest.param("hunyuan_image_train_network.py", "int8", marks=pytest.mark.slow),
    ],
)
def test_weights_from_the_cache_train_the_same_lora(checkout, train, tmp_path, script, precision):
    """The second start reads the file of the first one, also with a data type in which the checkpoint is cast."""
    mixed = "no" if "hunyuan" in script else "bf16"  # upstream's HunyuanImage mixes precisions, which a CPU refuses
    words = ("--base_precision", precision, "--mixed_precision", mixed)
    plain = train(checkout, script, *words)
    first, second = (train(checkout, script, *words, "--base_precision_cache", str(tmp_path / "kept")) for _ in range(2))
    sources = [run.report["facts"]["base_precision"]["source"] for run in (plain, first, second)]
    assert sources == ["checkpoint", "checkpoint", "cache"]
    assert len(list((tmp_path / "kept").iterdir())) == 1
    for run in (first, second):
        assert run.tensors.keys() == plain.tensors.keys()
        assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in plain.tensors.items())


UNET = ("--network_train_unet_only",)


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("sdxl_train_network.py", ("--lowram",)),
        ("sdxl_train_network.py", ()),
        ("flux_train_network.py", ()),
        pytest.param("train_network.py", ("--lowram",), marks=pytest.mark.slow),
        pytest.param("sd3_train_network.py", (), marks=pytest.mark.slow),
        pytest.param("lumina_train_network.py", ("--cache_text_encoder_outputs", *UNET), marks=pytest.mark.slow),
        pytest.param("anima_train_network.py", (), marks=pytest.mark.slow),
    ],
)
def test_samples_do_not_change_the_lora(checkout, train, tmp_path, script, options):
    """Nor does loading on the run's device."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 2 --d 1\n")
    usual = ("--base_precision", "int8", "--mixed_precision", "bf16")
    samples = ("--sample_prompts", str(prompts), "--sample_every_n_steps", "2", "--sample_at_first")
    usual += tuple(option for option in options if option != "--lowram")
    run, plain = train(checkout, script, *usual, *options, *samples), train(checkout, script, *usual)
    assert run.code == 0, run.output[-3000:]
    assert len(list((run.folder / "sample").glob("*.png"))) == 3
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in plain.tensors.items())


@pytest.mark.newest
def test_merged_networks_have_a_cache_of_their_own(checkout, train, tmp_path):
    script, words = "sdxl_train_network.py", ("--base_precision", "int8", "--base_precision_cache", str(tmp_path / "kept"))
    base = train(checkout, script, *words)
    merged = ("--base_weights", str(base.file))
    runs = [train(checkout, script, *words, *more) for more in (merged, merged, ())]
    assert [run.report["facts"]["base_precision"]["source"] for run in runs] == ["checkpoint", "cache", "cache"]
    assert all(torch.equal(tensor, runs[1].tensors[name]) for name, tensor in runs[0].tensors.items())
    assert all(torch.equal(tensor, runs[2].tensors[name]) for name, tensor in base.tensors.items())


@pytest.mark.only("v0.11")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--base_precision", "int8", "--fp8_base", "--mixed_precision", "bf16"),
            "--base_precision int8: --fp8_base changes the base too; remove one of the two",
        ),
        (("--int8_convolutions",), "--int8_convolutions: it needs --base_precision int8; add it, or remove the option"),
        (("--int8_convolutions", "--base_precision", "fp8"), "--int8_convolutions: it needs --base_precision int8"),
        (("--base_precision_cache", "kept"), "--base_precision, which is not set; add --base_precision int8"),
    ],
)
def test_refusal_precedes_loading(checkout, train, options, message):
    run = train(checkout, "sdxl_train_network.py", *options)
    assert run.code == 2
    assert message in " ".join(run.output.split())
    assert "base precision:" not in run.output
    assert "prepare images" not in run.output
