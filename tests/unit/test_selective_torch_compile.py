"""What selective compile leaves to eager code, by the arguments alone."""

from argparse import Namespace

import pytest

from kohya_ext.compiling.support import reason_to_stand_aside


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"torch_compile": True}, "--torch_compile compiles the whole model"),
        ({"compile": True}, "sd-scripts' own --compile"),
        ({"deepspeed": True}, "DeepSpeed"),
        ({"split_attn": True}, "--split_attn cuts"),
        ({"network_module": "networks.dylora"}, "DyLoRA draws the rank"),
        ({"network_module": "lycoris.kohya", "network_args": ["algo=dylora"]}, "DyLoRA draws the rank"),
        ({"network_module": "networks.lora", "network_args": ["conv_dim=4", "module_dropout=0.1"]}, "module_dropout draws"),
    ],
    ids=str,
)
def test_it_stands_aside(given, reason):
    assert reason in reason_to_stand_aside(Namespace(**given))


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
def test_it_compiles(given):
    assert reason_to_stand_aside(Namespace(**given)) is None
