"""Descriptions of the files that the real scripts write, and the formulas of upstream's own networks."""

import pytest

from kohya_ext.preflight.model_files import MODEL
from kohya_ext.weights import deltas, judgement, names, report
from kohya_ext.weights.tensor_file import TensorFile

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

LORA = "sdxl_train_network.py"


def described(run):
    assert run.code == 0, run.output[-3000:]
    with TensorFile(run.file) as file:
        return report.describe(file)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("network", "options", "kind"),
    [
        ("networks.lora", ("conv_dim=2",), "LoCon"),
        ("networks.dylora", ("unit=2",), "DyLoRA"),
        ("networks.lora_fa", (), "LoRA-FA"),
        ("networks.oft", (), "OFT"),
    ],
)
def test_networks_of_upstream(checkout, train, network, options, kind):
    check_network(checkout, train, network, options, kind)


@pytest.mark.only("v0.11")  # the first generation with these networks
@pytest.mark.parametrize(("network", "kind"), [("networks.loha", "LoHa"), ("networks.lokr", "LoKr")])
def test_lycoris_networks_of_upstream(checkout, train, network, kind):
    check_network(checkout, train, network, (), kind)


def check_network(checkout, train, network, options, kind):
    arguments = ("--network_args", *options) if options else ()
    result = described(train(checkout, LORA, "--network_module", network, "--max_train_steps", "2", *arguments))
    assert (result.kind, result.problems) == (kind, [])
    assert all(module.norm is not None and (module.norm > 0) == module.moved for module in result.modules)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("script", "component", "kind"),
    [
        (LORA, "U-Net", "LoRA"),
        ("flux_train_network.py", "transformer", "LoRA"),
        pytest.param("sd3_train_network.py", "transformer", "LoRA", marks=pytest.mark.slow),
        pytest.param("lumina_train_network.py", "transformer", "LoRA", marks=pytest.mark.slow),
        pytest.param("hunyuan_image_train_network.py", "transformer", "LoRA", marks=pytest.mark.slow),
        pytest.param("anima_train_network.py", "transformer", "LoRA", marks=pytest.mark.slow),
        ("sdxl_train_control_net_lllite.py", "U-Net", "ControlNet-LLLite"),
        pytest.param("sdxl_train_textual_inversion.py", "model", "textual inversion", marks=pytest.mark.slow),
        ("sdxl_train.py", "U-Net", "checkpoint"),
        pytest.param("flux_train.py", "transformer", "checkpoint", marks=pytest.mark.slow),
    ],
)
def test_files_of_the_scripts(checkout, upstream, script, component, kind):
    result = described(upstream(checkout, script))
    assert (result.kind, result.problems, result.unmoved()) == (kind, [], [])
    assert {group.component for group in result.groups if not group.component.startswith(("text encoder", "VAE"))} == {
        component
    }
    if kind == "LoRA":
        assert result.run["trained"].startswith("4 of 4 steps, ")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("script", "family"),
    [
        (LORA, "sdxl"),
        pytest.param("train_network.py", "sd15", marks=pytest.mark.thorough),
        pytest.param("flux_train_network.py", "flux", marks=pytest.mark.slow),
        pytest.param("sd3_train_network.py", "sd3", marks=pytest.mark.slow),
        pytest.param("lumina_train_network.py", "lumina", marks=pytest.mark.slow),
        pytest.param("hunyuan_image_train_network.py", "hunyuan-image", marks=pytest.mark.slow),
        pytest.param("anima_train_network.py", "anima", marks=pytest.mark.slow),
        pytest.param("sdxl_train.py", "sdxl", marks=pytest.mark.slow),
    ],
)
def test_files_of_the_scripts_are_judged_against_their_base(checkout, upstream, models, script, family):
    run = upstream(checkout, script)
    assert run.code == 0, run.output[-3000:]
    base = models(family).files[MODEL]
    with TensorFile(run.file) as file, TensorFile(base) as model:
        described = report.describe(file)
        result = judgement.judge(file, model, described)
    assert result.problems == []
    # The text encoders of FLUX and others are files of their own.
    apart = {module for module in result.unmatched if module.startswith(("lora_te", "logit_scale"))}
    assert set(result.unmatched) == (set() if family in ("sdxl", "sd15") else apart)
    assert 0 < result.largest.relative < 0.5


def state(module, prefix="lora_unet_x"):
    """Return a module's tensors with random values, as upstream saves them."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return {f"{prefix}.{name}": tensor.detach().clone() for name, tensor in module.state_dict().items()}


def change(tensors, tmp_path):
    safetensors.save_file(tensors, tmp_path / "x.safetensors")
    ((_, module),) = names.adapted_modules(tensors)[0].items()
    with TensorFile(tmp_path / "x.safetensors") as file:
        return deltas.delta(file, module)


LINEAR = {"in_features": 24, "out_features": 32, "bias": False}
CONVOLUTION = {"in_channels": 24, "out_channels": 32, "kernel_size": 3, "bias": False}


@pytest.mark.only("v0.11")
@pytest.mark.parametrize("network", ["loha.LoHaModule", "lokr.LoKrModule"])
@pytest.mark.parametrize("convolution", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_tucker": True}, {"lora_dim": 64}], ids=str)
def test_changes_are_those_of_upstreams_lycoris_networks(checkout_module, tmp_path, network, convolution, options):
    file, name = network.split(".")
    layer = torch.nn.Conv2d(**CONVOLUTION) if convolution else torch.nn.Linear(**LINEAR)
    module = getattr(checkout_module(f"networks.{file}"), name)(
        "lora_unet_x", layer, **{"lora_dim": 4, "alpha": 2, "factor": 4, **options}
    )
    del module.org_module
    ours = change(state(module), tmp_path)
    expected = module.get_diff_weight().detach()
    assert ours.products["weight"].dense().reshape(expected.shape).sub(expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.newest
def test_rotation_is_that_of_upstreams_oft(checkout_module, tmp_path):
    module = checkout_module("networks.oft").OFTModule("oft_unet_x", torch.nn.Linear(**LINEAR), dim=4, alpha=1e-2)
    ours = change(state(module), tmp_path)
    expected = module.get_weight() - torch.eye(module.get_weight().shape[-1])
    assert ours.norm() == pytest.approx(float(expected.detach().norm()), rel=1e-4)


@pytest.mark.newest
@pytest.mark.parametrize("convolution", [False, True])
def test_change_is_that_of_upstreams_lora(checkout_module, tmp_path, convolution):
    layer = torch.nn.Conv2d(**CONVOLUTION) if convolution else torch.nn.Linear(**LINEAR)
    network = checkout_module("networks.lora")
    module = network.LoRAInfModule("lora_unet_x", layer, 1.0, 4, 2)
    del module.org_module
    ours, expected = change(state(module), tmp_path), module.get_weight().detach()
    assert ours.products["weight"].dense().reshape(expected.shape).sub(expected).abs().max() < 1e-6
