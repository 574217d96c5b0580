"""Presets as files for the kohya_ss GUI: they fill in the form so that a run trains as with the preset alone."""

import json
from pathlib import Path

import pytest

from kohya_ext.commands import presets
from kohya_ext.config import gui_form, preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate import memory_config
from kohya_ext.planning.tiers import tiers

TIERS = {tier.name: tier for tier in (*tiers(), *tiers(experimental=True))}

#: What the GUI writes into a run's config file whatever the form's fields are, as in 45088f04.
ALWAYS = {"dynamo_backend": "no", "noise_offset_type": "Original", "max_data_loader_n_workers": 0, "lr_scheduler_args": []}


def exported(tmp_path, *names, script="sdxl_train_network.py"):
    presets._export(names, script, tmp_path)
    (file,) = tmp_path.glob("*.json")
    return json.loads(file.read_text("utf-8"))


def config_file(fields, family, tmp_path):
    """Return the config file that the GUI writes for a LoRA with these fields, by the names of its source."""
    cache = {"sdxl": "sdxl", "flux": "flux1", "chroma": "flux1", "hunyuan-image": "hunyuan_image"}.get(family, family)
    own = {"hunyuan-image": "hunyuan_"}.get(family, f"{family}_" if family in ("lumina", "anima") else "")
    values = {
        **ALWAYS,
        "optimizer_type": fields["optimizer"],
        "optimizer_args": fields["optimizer_args"].split(),
        "resolution": fields["max_resolution"],
        "sdpa": fields["xformers"] == "sdpa",
        "cache_text_encoder_outputs": fields.get(f"{cache}_cache_text_encoder_outputs", False),
        "network_train_unet_only": fields.get("text_encoder_lr") == 0 and fields["unet_lr"] != 0,
    }
    same = (
        *("learning_rate", "lr_scheduler", "lr_warmup_steps", "train_batch_size", "cache_latents", "enable_bucket"),
        *("max_bucket_reso", "max_grad_norm", "mixed_precision", "gradient_checkpointing", "fp8_base", "full_bf16"),
        *("gradient_accumulation_steps", "min_snr_gamma", "network_dim", "network_alpha", "model_type", "guidance_scale"),
        *("apply_t5_attn_mask", "blocks_to_swap"),
    )
    values |= {name: fields[name] for name in same if name in fields}
    prefixed = "discrete_flow_shift model_prediction_type timestep_sampling fp8_scaled fp8_vl text_encoder_cpu"
    prefixed += " attn_mode" * (family == "hunyuan-image")
    values |= {name: fields[own + name] for name in prefixed.split() if own + name in fields}
    file = tmp_path / "config_lora.toml"
    written = {name: value for name, value in values.items() if name in ALWAYS or value not in ("", False, None)}
    lines = (f"{name} = {json.dumps(value)}" for name, value in written.items())
    file.write_text("\n".join(lines), "utf-8")
    return str(file)


@pytest.mark.parametrize("name", [name for name, tier in TIERS.items() if tier.config.trains_network])
def test_exported_preset_trains_as_the_preset_alone(tmp_path, name):
    script = preset_files.scripts(TIERS[name].family)[0]
    alone = CommandLine(Path(script), ["--preset", name], {}, has_bf16=True)
    fields = exported(tmp_path, name, script=script)
    given = ["--config_file", config_file(fields, TIERS[name].config.family.name, tmp_path)]
    loaded = CommandLine(Path(script), [*given, *fields["additional_parameters"].split()], {}, has_bf16=True)
    assert not loaded.presets.held_back
    by_others = {"network_module"}  # the LoRA type
    assert {key: loaded.values.get(key) for key in alone.values if key not in by_others} == {
        key: value for key, value in alone.values.items() if key not in by_others
    }
    configs = [memory_config.normalized(memory_config.read(command)[0]) for command in (alone, loaded)]
    assert configs[0] == configs[1]


def test_what_the_preset_leaves_out_is_off(tmp_path):
    fields = exported(tmp_path, "sdxl-lora/24gb")
    assert fields["gradient_checkpointing"] is False
    assert fields["full_bf16"] is False
    assert (fields["sdxl"], fields["flux1_checkbox"], fields["LoRA_type"]) == (True, False, "Standard")
    assert "train_data_dir" not in fields  # stays as the user has entered it


def test_form_of_a_fine_tune_has_no_network(tmp_path):
    fields = exported(tmp_path, "flux-finetune/24gb", script="flux_train.py")
    assert fields["flux_fused_backward_pass"] is True
    assert not {"LoRA_type", "network_dim", "unet_lr"} & fields.keys()
    assert fields["optimizer_args"] == "scale_parameter=False relative_step=False warmup_init=False"


def test_every_option_of_a_tier_has_a_field_or_is_set_by_the_preset():
    options = {key for tier in TIERS.values() for key in preset_files.load([tier.name], tier.config.script).values}
    assert {key for key in options if gui_form.lacks(key)} == {
        *("base_precision", "fused_operations", "gradient_checkpointing_ratio", "keep_attention", "speed"),
        *("gradient_release", "optimizer_states_on_host", "master_weights"),
    }


def test_file_is_in_the_list_of_the_gui(tmp_path):
    (tmp_path / "kohya_gui.py").touch()
    presets._export(["sdxl-lora/12gb"], "sdxl_train_network.py", tmp_path)
    presets._export(["sdxl-finetune/24gb"], "sdxl_train.py", tmp_path)
    files = {str(file.relative_to(tmp_path)).replace("\\", "/") for file in tmp_path.rglob("*.json")}
    assert files == {
        "presets/lora/user_presets/kohya_ext sdxl-lora 12gb.json",
        "presets/finetune/user_presets/kohya_ext sdxl-finetune 24gb.json",
    }


def test_presets_are_stacked(tmp_path):
    fields = exported(tmp_path, "12gb", "quality")
    assert fields["additional_parameters"] == "--preset sdxl-lora/12gb --preset sdxl-lora/quality"
    assert fields["lr_scheduler"] == "cosine"


def test_preset_without_a_size_cannot_be_exported(tmp_path):
    with pytest.raises(UserError, match="no GPU size"):
        exported(tmp_path, "quality")
