"""Arguments with which selective compile and CUDA graphs are disabled."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from kohya_ext.patches import selective_torch_compile

from kohya_ext.compiling.blocks import RUN
from kohya_ext.compiling.support import reason_not_to_compile, reason_not_to_record
from kohya_ext.config.command_line import CommandLine
from kohya_ext.patching import training_loop
from kohya_ext.patching.training_loop import Program, TrainingRun


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"torch_compile": True}, "--torch_compile already compiles the whole model"),
        ({"compile": True}, "sd-scripts' --compile"),
        ({"deepspeed": True}, "DeepSpeed"),
        ({"split_attn": True}, "--split_attn slices"),
        ({"network_module": "networks.dylora"}, "DyLoRA draws a random rank"),
        ({"network_module": "lycoris.kohya", "network_args": ["algo=dylora"]}, "DyLoRA draws a random rank"),
        (
            {"network_module": "networks.lora", "network_args": ["conv_dim=4", "module_dropout=0.1"]},
            "module_dropout skips layers",
        ),
    ],
    ids=str,
)
def test_arguments_that_disable_compiling(given, reason):
    assert reason in reason_not_to_compile(Namespace(**given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"model_type": "chroma", "network_args": None},
        {"network_module": "networks.lora", "network_args": ["conv_dim=4", "rank_dropout=0.1", "module_dropout=0"]},
        {"network_module": "lycoris.kohya", "network_args": ["algo=loha", "a_flag"]},
    ],
    ids=str,
)
def test_arguments_that_allow_compiling(given):
    assert reason_not_to_compile(Namespace(**given)) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "only networks"),
        ({"network_module": "networks.lora", "blocks_to_swap": 4}, "--blocks_to_swap"),
        ({"network_module": "networks.oft"}, "OFT inverts matrices"),
        ({"network_module": "networks.boft"}, "OFT inverts matrices"),
        ({"network_module": "networks.oft_v2"}, "networks.oft_v2 is not tested"),
        ({"network_module": "lycoris.kohya", "network_args": ["algo=diag-oft"]}, "OFT inverts matrices"),
        ({"network_module": "networks.dylora"}, "DyLoRA"),
        ({"network_module": "networks.lora", "network_dropout": 0.1, "gradient_checkpointing": True}, "dropout with"),
    ],
    ids=str,
)
def test_arguments_that_disable_cuda_graphs(given, reason):
    assert reason in reason_not_to_record(Namespace(**given))


def test_a_lora_may_be_recorded():
    assert reason_not_to_record(Namespace(network_module="networks.lora", network_dropout=0.1)) is None


@pytest.mark.parametrize(
    ("capability", "version", "words", "is_compiled"),
    [
        ((7, 5), "3.8.0", ("--preset", "speed"), False),
        ((7, 5), "3.8.0", ("--preset", "speed", "--selective_torch_compile"), True),
        ((7, 5), "3.2.0", ("--preset", "speed"), True),
        ((8, 6), "3.8.0", ("--preset", "speed"), True),
    ],
)
def test_a_preset_compiles_no_blocks_on_a_gpu_that_triton_does_not_support(
    monkeypatch, capsys, capability, version, words, is_compiled
):
    torch, triton = pytest.importorskip("torch"), pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(triton, "__version__", version)
    command = CommandLine(Path("sdxl_train_network.py"), words, {})
    accelerator = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(training_loop, "_current", TrainingRun(accelerator, Program(None, command)))
    assert command.settings["selective_torch_compile"]
    selective_torch_compile._start(Namespace(), accelerator, command.settings)
    assert (RUN.disabled_because is None) == is_compiled
    expected = "Triton 3.8.0 supports compute capability 8.0 and newer, and this GPU has 7.5; to try it, add --selective"
    assert (expected in capsys.readouterr().err) != is_compiled
    monkeypatch.setattr(RUN, "disabled_because", None)
