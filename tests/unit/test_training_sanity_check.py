"""Weights without a gradient in the first step."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from kohya_ext.patches.training_sanity_check import _Check

torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.Linear(1, 1, bias=False))


def warnings_of(capsys, *without, trained=("used",)):
    model = Model(*trained, *without)
    for name in trained:
        model.get_submodule(name).weight.grad = torch.ones(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = SimpleNamespace(
        num_processes=1, distributed_type="NO", unwrap_model=lambda each: each, _models=[model], _optimizers=[optimizer]
    )
    check = _Check(Namespace(), None)
    check.before_batch(accelerator)
    check.before_step(optimizer)
    return capsys.readouterr().err


def test_they_are_named(capsys):
    warning = warnings_of(capsys, *"abcdef")
    assert "6 of 7 trained weights have no gradient in the first step: a.weight, b.weight, c.weight and 3 more" in warning


def test_the_last_layers_of_a_text_encoder_are_not_unusual(capsys):
    assert warnings_of(capsys, "lora_te1_text_model_encoder_layers_11") == ""
