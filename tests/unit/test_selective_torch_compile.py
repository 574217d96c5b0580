"""Arguments with which selective compile is disabled."""

from argparse import Namespace

import pytest

from kohya_ext.compiling.support import reason_not_to_compile


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
