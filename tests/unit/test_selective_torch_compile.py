"""Arguments with which selective compile and CUDA graphs are disabled."""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext.compiling import configuration
from kohya_ext.compiling.support import reason_not_to_compile, reason_not_to_record


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


@pytest.mark.parametrize("chosen", [False, True])
def test_compiled_code_is_kept_although_torch_has_chosen_a_temporary_folder(monkeypatch, tmp_path, chosen):
    """torch._dynamo sets the variable when it is imported."""
    folder = tmp_path if chosen else Path(tempfile.gettempdir()) / "torchinductor_somebody"
    monkeypatch.setenv(configuration.CACHE_VARIABLE, str(folder))
    monkeypatch.setenv("KOHYA_EXT_CACHE", str(tmp_path / "cache"))
    kept = configuration.keep_compiled_code("cpu", "abc")
    assert str(kept) == os.environ[configuration.CACHE_VARIABLE]
    assert (kept == folder) is chosen
    assert chosen or tmp_path / "cache" in kept.parents
