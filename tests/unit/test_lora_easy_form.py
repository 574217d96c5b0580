"""Presets as files of LoRA_Easy_Training_Scripts: loaded there, they give a run the values of the preset alone."""

import json
from pathlib import Path

import pytest
import toml

from kohya_ext.__main__ import main
from kohya_ext.config import lora_easy_form, preset_files
from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.estimate import memory_config
from kohya_ext.planning.tiers import tiers

FAMILIES = ("sdxl-lora", "sd15-lora", "flux-lora")
TIERS = {tier.name: tier for family in FAMILIES for tier in (*tiers(family), *tiers(family, experimental=True))}

#: A saved file with other values for most of what a preset sets, and with entries of the user.
SAVED = """
[[subsets]]
image_dir = "C:/Müller"

[train_mode]
train_mode = "lora"

[general_args.args]
pretrained_model_name_or_path = "C:/Müller/model.safetensors"
mixed_precision = "fp16"
full_fp16 = true
fp8_base = true
clip_skip = 1
v2 = true
xformers = true
gradient_checkpointing = true
gradient_accumulation_steps = 4
max_train_epochs = 3
max_token_length = 75

[general_args.dataset_args]
resolution = [512, 768]
batch_size = 5

[network_args.args]
network_dim = 64
network_train_text_encoder_only = true
network_args = { algo = "lokr", conv_dim = 8 }

[optimizer_args.args]
optimizer_type = "Prodigy"
lr_scheduler_type = "LoraEasyCustomOptimizer.RexAnnealingWarmRestarts.RexAnnealingWarmRestarts"
learning_rate = 1.0
unet_lr = 0.5
max_grad_norm = 0.5
min_snr_gamma = 5
optimizer_args = { weight_decay = "0.1" }

[flux_args.args]
ae = "C:/ae.safetensors"
blocks_to_swap = 20
split_mode = true

[extra_args.args]
save_state_every_n_minutes = "10"
"""


def exported(file, *names, script=None):
    more = [] if script is None else ["--script", script]
    return main(["presets", "export", *names, *more, "--for", "lora_easy", "--output", str(file)])


def run_files(document, folder):
    """Write the config file and the dataset config that the window and its backend make of a file, as in ae5ce07.

    The window resets all other fields, and writes these for every run. The backend leaves out empty ones. Loading an SDXL
    file, the window turns off the caching of text encoder outputs.
    """
    flux, tables = bool(document.get("flux_args")), {**document}
    fields = {name: dict(table.get("args", {})) for name, table in tables.items() if isinstance(table, dict)}
    data = {
        key: value
        for table in tables.values()
        if isinstance(table, dict)
        for key, value in table.get("dataset_args", {}).items()
    }
    general, network = fields["general_args"], fields["network_args"]
    if not flux:
        network.pop("cache_text_encoder_outputs", None)
        network.pop("cache_text_encoder_outputs_to_disk", None)
    if general["max_token_length"] == 75:
        del general["max_token_length"]
    if general.pop("sdxl", False):
        del general["clip_skip"]
    values = {"max_grad_norm": 1.0, "loss_type": "l2", "seed": 23, "prior_loss_weight": 1.0}
    for table in (*fields.values(), {"network_module": "networks.lora_flux" if flux else "networks.lora"}):
        values |= table
    values["optimizer_args"] = [f"{name}={value}" for name, value in values.get("optimizer_args", {}).items()]
    config, dataset = folder / "config.toml", folder / "dataset.toml"
    config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value), "utf-8")
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in data.items() if value)
    dataset.write_text(f"[general]\n{lines}\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'x'\n", "utf-8")
    return ["--config_file", str(config), "--dataset_config", str(dataset)]


@pytest.mark.parametrize("saved", ["", SAVED], ids=["alone", "into a saved file"])
@pytest.mark.parametrize("name", TIERS)
def test_exported_preset_trains_as_the_preset_alone(tmp_path, name, saved):
    file, script = tmp_path / "a.toml", preset_files.scripts(TIERS[name].family)[0]
    if saved:
        file.write_text(saved, encoding="locale")
    assert exported(file, name) == 0
    preset = CommandLine(Path(script), ["--preset", name], {}, has_bf16=True)
    alone = preset.with_(preset.presets.assumed)
    document = toml.loads(file.read_text("ascii"))
    assert bool(document.get("flux_args")) == (script == "flux_train_network.py")
    words = [*run_files(document, tmp_path), *option_words(alone.presets.assumed)]
    loaded = CommandLine(Path(script), words, {}, has_bf16=True)
    of_data = {"resolution", "train_batch_size", "enable_bucket", "max_bucket_reso"}
    expected = {key: value for key, value in alone.values.items() if key not in of_data and value is not False}
    assert {key: loaded.values.get(key) for key in expected} == expected
    configs = [memory_config.normalized(memory_config.read(command)[0]) for command in (alone, loaded)]
    assert configs[0] == configs[1]


def test_other_entries_of_a_saved_file_stay(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(SAVED, encoding="locale")
    assert exported(file, "flux-lora/24gb") == 0
    assert "Loading replaces" not in capsys.readouterr().err
    document = toml.loads(file.read_text("ascii"))
    assert document["subsets"] == [{"image_dir": "C:/Müller"}]
    assert document["general_args"]["args"]["pretrained_model_name_or_path"] == "C:/Müller/model.safetensors"
    assert document["general_args"]["args"]["max_train_epochs"] == 3
    assert document["flux_args"]["args"]["ae"] == "C:/ae.safetensors"
    assert document["extra_args"]["args"] == {"save_state_every_n_minutes": "10", "preset": "flux-lora/24gb"}


def test_without_a_saved_file_it_says_how_entries_stay(tmp_path, capsys):
    assert exported(tmp_path, "sdxl-lora/12gb", "any/quality") == 0
    printed = capsys.readouterr()
    assert "kohya_ext sdxl-lora 12gb any quality.toml" in printed.out
    assert "Loading replaces the whole form. To keep your entries" in printed.err
    assert 'lr_warmup_steps=100; the form has "Warmup Ratio" instead' in printed.err


def test_optimizers_that_the_window_lacks_are_extra_arguments():
    document = lora_easy_form.form({"optimizer_type": "PagedAdamW8bit"}, "sdxl", ["x"], {})
    assert document["optimizer_args"]["args"]["optimizer_type"] == "AdamW"
    assert document["extra_args"]["args"] == {"preset": "x", "optimizer_type": "PagedAdamW8bit"}
    document = lora_easy_form.form(
        {"optimizer_type": "adafactor", "optimizer_args": ["relative_step=False"]}, "sdxl", ["x"], document
    )
    assert document["optimizer_args"]["args"]["optimizer_type"] == "AdaFactor"
    assert document["optimizer_args"]["args"]["optimizer_args"] == {"relative_step": "False"}
    assert document["extra_args"]["args"] == {"preset": "x"}


def test_other_models_and_files_are_errors(tmp_path, capsys):
    assert exported(tmp_path, "sdxl-finetune/24gb") == 2
    assert "trains LoRAs with train_network.py, sdxl_train_network.py, flux_train_network.py" in capsys.readouterr().err
    other = tmp_path / "config.toml"
    for text in ("learning_rate = 1e-4", "[", "train_mode = 1"):
        other.write_text(text)
        assert exported(other, "sdxl-lora/12gb") == 2
        assert other.read_text() == text
        assert "is not a file of LoRA_Easy_Training_Scripts" in capsys.readouterr().err


def test_every_option_of_a_tier_has_a_field_or_is_set_by_the_preset():
    options = {key for tier in TIERS.values() for key in preset_files.load([tier.name], tier.config.script).values}
    own = {"base_precision", "fused_operations", "gradient_checkpointing_ratio", "keep_attention", "speed"}
    assert {key for key in options if lora_easy_form.lacks(key)} == own
