"""--base_precision: which layers are converted and when, and which runs are refused."""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import base_precision  # noqa: E402

from kohya_ext.config.command_line import CommandLine  # noqa: E402
from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.dry_run import estimation  # noqa: E402
from kohya_ext.errors import UserError  # noqa: E402
from kohya_ext.estimate.memory_config import MemoryConfig  # noqa: E402
from kohya_ext.patching import training_loop  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402
from kohya_ext.patching.training_loop import Program, TrainingRun  # noqa: E402
from kohya_ext.quantization.linear import Linear, dequantized  # noqa: E402
from kohya_ext.quantization.selection import NETWORKS, reason_to_refuse, reason_to_refuse_convolutions  # noqa: E402
from kohya_ext.sdscripts.checkouts import Checkout  # noqa: E402
from kohya_ext.weights.postponed import History, PostponedCast  # noqa: E402
from kohya_ext.weights.scaling import Scaling  # noqa: E402


class Transformer2DModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj_in, self.conv = torch.nn.Linear(64, 64), torch.nn.Conv2d(4, 4, 1)


class SdxlUNet2DConditionModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.time_embed, self.attention = torch.nn.Linear(8, 8), Transformer2DModel()


def create_network(multiplier, network_dim, network_alpha, vae, text_encoder, unet, **kwargs):
    return type(unet.attention.proj_in), kwargs


def create_network_from_weights(multiplier, file, vae, text_encoder, unet, weights_sd=None, for_inference=False, **kwargs):
    return type(unet.attention.proj_in)


@pytest.fixture
def network(monkeypatch):
    """A network's module, in a run with the patch."""
    module = ModuleType("networks.lora")
    module.create_network, module.create_network_from_weights = create_network, create_network_from_weights
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patch = base_precision.PATCH
    checkout = Checkout(Path("sd-scripts"), "0.11.1", "v0.11", "for this test")
    patcher = Patcher({patch.name: patch}, Settings(base_precision="int8"), checkout)
    patcher.arm()
    program = Program(checkout, CommandLine(Path("sdxl_train_network.py"), (), {}))
    run = TrainingRun(SimpleNamespace(device=torch.device("cpu")), program)
    monkeypatch.setattr(training_loop, "_current", run)
    arguments = Namespace(network_module="networks.lora")
    run.callbacks.append(base_precision._start(arguments, run.accelerator, patcher.settings))
    yield module
    patcher.undo()
    assert module.create_network is create_network


def test_layers_are_converted_before_the_network_is_created(network, capsys):
    model = SdxlUNet2DConditionModel()
    kind, options = network.create_network(1.0, 4, 1.0, None, None, model, neuron_dropout=None)
    assert kind is Linear
    assert options == {"neuron_dropout": None}
    assert type(model.time_embed) is torch.nn.Linear
    assert model.attention.conv.weight.dtype is torch.float32
    assert "base precision: 1 frozen linear layers in 8 bits" in capsys.readouterr().err


def test_merged_networks_see_the_true_weights(network):
    model = SdxlUNet2DConditionModel()
    merging = network.create_network_from_weights(1.0, "a", None, None, model, for_inference=True)
    assert merging is torch.nn.Linear
    assert network.create_network_from_weights(1, "a", None, None, model) is Linear


@pytest.mark.parametrize("cached", [True, False])
def test_the_first_compilation_is_announced(monkeypatch, tmp_path, capsys, cached):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if cached:
        (tmp_path / "A1").mkdir()
        (tmp_path / "A1" / "_multiply.json").write_text("{}")
    monkeypatch.setattr(base_precision, "_products", lambda *_: "kernels")
    monkeypatch.setattr(base_precision, "program", lambda: Program(None, CommandLine(Path("sdxl_train_network.py"), [], {})))
    accelerator = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    base_precision._start(Namespace(network_module="networks.lora"), accelerator, Settings(base_precision="int8"))
    assert ("compiles its kernels" in capsys.readouterr().err) is not cached


@pytest.mark.parametrize(("products", "expected"), [("operations", "operations"), ("weights", None)])
def test_convolutions_stay_in_16_bits_where_nothing_multiplies_in_8_bits(monkeypatch, capsys, products, expected):
    monkeypatch.setattr(base_precision, "_products", lambda *_: products)
    monkeypatch.setattr(base_precision, "program", lambda: Program(None, CommandLine(Path("sdxl_train_network.py"), [], {})))
    accelerator = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    settings = Settings(base_precision="int8", int8_convolutions=True)
    base = base_precision._start(Namespace(network_module="networks.lora"), accelerator, settings)
    assert base.convolutions == expected
    printed = capsys.readouterr().err
    assert ("--int8_convolutions has no effect: the GPU cannot multiply in 8 bits" in printed) is (expected is None)


@pytest.mark.parametrize(
    ("precision", "script", "reason"),
    [
        (None, "sdxl_train_network.py", "it needs --base_precision int8"),
        ("fp8", "sdxl_train_network.py", "it needs --base_precision int8"),
        ("int8", "flux_train_network.py", "the model of flux_train_network.py has no convolutions for it"),
    ],
)
def test_refusals_of_8_bit_convolutions(precision, script, reason):
    assert reason in reason_to_refuse_convolutions(precision, Namespace(), script)
    assert reason_to_refuse_convolutions("int8", Namespace(), "sdxl_train_network.py") is None


def test_model_without_known_layers_stays_as_it_is(network, capsys):
    network.create_network(1.0, 4, 1.0, None, None, SimpleNamespace(named_modules=list, attention=Transformer2DModel()))
    assert "has no linear layers to convert" in capsys.readouterr().err


def load_anima_model(device, dit_path, attn_mode, split_attn, loading_device, dit_weight_dtype, fp8_scaled=False):
    return loading_device, dit_weight_dtype


def test_model_is_loaded_on_the_host_and_converted_there(network, monkeypatch):
    module = ModuleType("library.anima_utils")
    module.load_anima_model = load_anima_model
    patcher = Patcher(
        {"base_precision": base_precision.PATCH},
        Settings(base_precision="int8"),
        Checkout(Path("sd-scripts"), "0.11.1", "v0.11", "for this test"),
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    patcher.arm()
    loaded = module.load_anima_model("cuda", "a", "torch", False, "cuda", torch.bfloat16)
    monkeypatch.setattr(training_loop, "_current", None)  # outside a run, as in an estimate
    unchanged = module.load_anima_model("cuda", "a", "torch", False, "cuda", torch.bfloat16)
    patcher.undo()
    assert (loaded, unchanged) == (("cpu", torch.bfloat16), ("cuda", torch.bfloat16))


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("sdxl_train.py", {}, "sdxl_train.py trains the base itself or copies it"),
        ("sdxl_train_control_net.py", {}, "trains the base itself or copies it"),
        ("sdxl_train_network.py", {"fp8_base": True}, "--fp8_base changes the base too"),
        ("flux_train_network.py", {"fp8_base_unet": True}, "--fp8_base_unet changes the base too"),
        ("hunyuan_image_train_network.py", {"fp8_scaled": True}, "--fp8_scaled changes the base too"),
        ("sdxl_train_network.py", {"network_module": "networks.oft"}, "networks.oft may read the base's weights"),
        ("sdxl_train_network.py", {"network_module": "lycoris.kohya"}, "lycoris.kohya may read the base's weights"),
        ("flux_train_network.py", {"network_args": ["ggpo_beta=1", "rank_dropout=0"]}, "GGPO reads the base's weights"),
        ("sdxl_train_network.py", {"deepspeed": True}, "DeepSpeed moves the base's weights"),
    ],
)
def test_refusals(script, arguments, reason):
    arguments = {"network_module": "networks.lora", **arguments}
    assert reason in reason_to_refuse(Namespace(**arguments), script)


@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_networks_that_call_their_layers_are_accepted(network):
    arguments = Namespace(network_module=network, network_args=["rank_dropout=0.1"])
    assert reason_to_refuse(arguments, "sdxl_train_network.py") is None


def test_estimates_refuse_the_same_runs():
    config = MemoryConfig("sdxl_train_network.py", network_module="networks.lora", base_precision="int8")
    command = CommandLine(Path("sdxl_train_network.py"), (), {})
    estimation._check(command, config)
    with pytest.raises(UserError, match="--base_precision int8: --fp8_base changes the base too"):
        estimation._check(command, replace(config, fp8_base=True))


@pytest.mark.parametrize("is_leading", [True, False])
def test_a_cache_that_cannot_be_written_does_not_end_the_run(tmp_path, capsys, is_leading):
    """One process of each machine writes it."""
    (tmp_path / "file").touch()
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_local_main_process=is_leading)
    base = base_precision._Base(accelerator, torch.int8, "operations", tmp_path / "file" / "kept.safetensors")
    model = SdxlUNet2DConditionModel()
    base.convert(model)
    assert type(model.attention.proj_in) is Linear
    assert ("the weights are not kept" in capsys.readouterr().err) == is_leading


def test_a_cache_of_other_weights_is_replaced(tmp_path, capsys):
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_local_main_process=True)
    sources = []
    for weights in (0, 0, 1):
        base = base_precision._Base(accelerator, torch.int8, "operations", tmp_path / "kept.safetensors")
        torch.manual_seed(weights)
        base.convert(SdxlUNet2DConditionModel())
        sources.append(base.facts["source"])
    assert sources == ["checkpoint", "cache", "checkpoint"]
    assert "kept.safetensors is not used, because it was made with another content; quantizing" in capsys.readouterr().err


def test_fp8_weights_of_a_file_are_taken_without_another_rounding():
    """Those of rows or of the whole matrix. A merged one is quantized from its new values."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), is_local_main_process=True)
    torch.manual_seed(0)
    values, scale = torch.randn(64, 64).to(torch.float8_e4m3fn), torch.rand(())
    for scales, is_merged, is_taken in ((scale, False, True), (torch.rand(64, 1), False, True), (scale, True, False)):
        history = History(values, scaling=Scaling(scales, 0)).cast(torch.float16)
        model = SdxlUNet2DConditionModel()
        model.attention.proj_in.weight = torch.nn.Parameter(PostponedCast(history), requires_grad=False)
        if is_merged:
            model.attention.proj_in.weight.data.mul_(1.5)
        base = base_precision._Base(accelerator, torch.float8_e4m3fn, "operations")
        base.convert(model)
        assert base.facts["taken"] == is_taken
        expected = values.float() * scales.reshape(-1, 1)
        assert torch.equal(dequantized(model.attention.proj_in), expected) == is_taken
