"""Weights without a gradient in the first step."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
from kohya_ext.patches.training_sanity_check import _Check, _in_files

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


OWN = {"lora_unet_double_blocks_0.alpha", "lora_te1_layers_0.alpha"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (OWN, ""),
        ({"lora_unet_double_blocks_0.alpha"}, ""),
        ({"lora_te1_layers_0.alpha"}, ""),
        ({*OWN, "lora_te3_layers_0.alpha"}, "1 of 3 weights"),
        (
            {"lora_unet_input_blocks_1.alpha", "lora_te1_layers_0.alpha"},
            "it is for another model or another program",
        ),  # CLIP-L is in both
        ({"lora_unet_input_blocks_1.alpha"}, "it is for another model or another program"),
    ],
)
def test_files_of_which_a_network_has_no_weight_are_named(tmp_path, capsys, names, message):
    file = str(tmp_path / "cat.safetensors")
    from safetensors.torch import save_file

    save_file({name: torch.zeros(1) for name in names}, file)
    problems = [*_in_files(Namespace(network_weights=file, base_weights=None), OWN)]
    printed = " ".join([*problems, capsys.readouterr().err])
    assert message in printed
    assert bool(printed) == bool(message)
    assert bool(problems) == ("another model" in message)
    assert not [*_in_files(Namespace(network_weights=None, base_weights=[file]), OWN)]
    assert ("nothing of it was merged" in capsys.readouterr().err) == bool(problems)
