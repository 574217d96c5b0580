"""Preset values that are held back because of the user's options."""

from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine, option_words
from kohya_ext.config.preset_conflicts import summary
from kohya_ext.config.preset_files import load, scripts, shipped
from kohya_ext.config.user_files import read_config_file

GUI = Path(__file__).parent.parent / "data" / "gui"

LORA, FINE_TUNE, FLUX = "sdxl_train_network.py", "sdxl_train.py", "flux_train_network.py"
CHROMA = "--model_type chroma"


def held_back(script, *argv):
    return {key: reason.text for key, reason in CommandLine(Path(script), argv, {}).presets.held_back.items()}


@pytest.mark.parametrize(
    ("script", "preset", "argv", "expected"),
    [
        (LORA, "12gb", "--text_encoder_lr 5e-5", {"network_train_unet_only", "cache_text_encoder_outputs"}),
        (LORA, "12gb", "--text_encoder_lr 0 1e-5", {"network_train_unet_only", "cache_text_encoder_outputs"}),
        (LORA, "12gb", "--text_encoder_lr 0", set()),
        (LORA, "12gb", "--text_encoder_lr 5e-5 --network_train_unet_only", set()),
        (LORA, "12gb", "--network_train_text_encoder_only", {"network_train_unet_only", "cache_text_encoder_outputs"}),
        (LORA, "24gb", "--text_encoder_lr 5e-5", {"network_train_unet_only"}),
        (LORA, "12gb", "--no-network_train_unet_only", {"cache_text_encoder_outputs"}),
        (LORA, "12gb", "--shuffle_caption", {"cache_text_encoder_outputs"}),
        (LORA, "12gb", "--shuffle_caption --caption_tag_dropout_rate 0.1 --cached_caption_variants 8", set()),
        (LORA, "12gb", "--caption_dropout_rate 0.1 --cached_caption_variants 8", set()),
        (LORA, "12gb", "--caption_dropout_every_n_epochs 3 --cached_caption_variants 8", set()),
        (LORA, "12gb", "--token_warmup_step 100 --cached_caption_variants 8", {"cache_text_encoder_outputs"}),
        (LORA, "12gb", "--weighted_captions --cached_caption_variants 8", {"cache_text_encoder_outputs"}),
        (LORA, "12gb", "--no-shuffle_caption", set()),
        (LORA, "12gb", "--caption_dropout_rate 0.1", {"cache_text_encoder_outputs"}),
        ("anima_train_network.py", "12gb", "--caption_dropout_rate 0.1", set()),
        (LORA, "12gb", "--color_aug", {"cache_latents"}),
        (LORA, "12gb", "--color_aug --cache_latents", set()),
        (LORA, "12gb", "--xformers", {"sdpa"}),
        (LORA, "12gb", "--no-gradient_checkpointing", {"gradient_checkpointing_ratio"}),
        (LORA, "12gb", "--use_8bit_adam", {"optimizer_type"}),
        (LORA, "12gb", "--resolution 128", {"enable_bucket", "max_bucket_reso"}),
        (LORA, "12gb", "--resolution 128 --min_bucket_reso 64", {"max_bucket_reso"}),
        (LORA, "12gb", "--resolution 768", {"max_bucket_reso"}),
        (LORA, "12gb", "--resolution 1024", set()),
        (LORA, "12gb", "--resolution 1536", {"enable_bucket", "max_bucket_reso"}),
        (LORA, "12gb", "--resolution 1536 --max_bucket_reso 3072", set()),
        (LORA, "12gb", "--network_dim 4", {"network_alpha"}),
        (LORA, "12gb", "--network_dim 16", {"network_alpha"}),
        (LORA, "12gb", "--network_alpha 0", {"network_dim"}),
        (LORA, "12gb", "--network_weights a.safetensors --dim_from_weights", {"network_dim", "network_alpha"}),
        (LORA, "12gb", "--network_module networks.oft", {"network_dim", "network_alpha"}),
        (LORA, "12gb", "--network_module networks.oft_v2", {"network_dim", "network_alpha"}),
        (LORA, "12gb", "--network_module networks.boft", {"network_dim", "network_alpha"}),
        (LORA, "12gb", "--network_module lycoris.kohya --network_args algo=boft", {"network_dim", "network_alpha"}),
        (LORA, "12gb", "--network_module lycoris.kohya --network_args algo=loha", set()),
        (LORA, "12gb", "--optimizer_type Prodigy", {"learning_rate"}),
        (LORA, "12gb", "--optimizer_type AdamW8bit", set()),
        (LORA, "12gb", "--use_lion_optimizer", {"optimizer_type", "learning_rate"}),
        (LORA, "12gb", "--learning_rate 5e-5", set()),
        (LORA, "12gb", "--optimizer_args weight_decay=0.1", {"optimizer_type"}),
        (LORA, "6gb", "--mixed_precision no", {"fp8_base"}),
        (LORA, "quality", "--lr_scheduler constant", {"lr_warmup_steps"}),
        (LORA, "quality", "--lr_scheduler constant_with_warmup", {"lr_warmup_steps"}),
        (LORA, "quality", "--lr_warmup_steps 50", set()),
        (LORA, "balanced", "--max_data_loader_n_workers 0", {"persistent_data_loader_workers"}),
        (LORA, "speed", "--max_data_loader_n_workers 0", {"persistent_data_loader_workers"}),
        (LORA, "speed", "--max_data_loader_n_workers 2", set()),
        (FINE_TUNE, "12gb", "--optimizer_type AdamW8bit", {"optimizer_args", "max_grad_norm", "fused_backward_pass"}),
        (FINE_TUNE, "12gb", "--optimizer_type adafactor", set()),
        (FINE_TUNE, "12gb", "--optimizer_type adafactor --optimizer_args clip_threshold=1.0", {"lr_warmup_steps"}),
        (FINE_TUNE, "12gb", "--optimizer_args a=1", {"optimizer_type", "max_grad_norm", "fused_backward_pass"}),
        (FINE_TUNE, "12gb", "--learning_rate 5e-6", set()),
        (FINE_TUNE, "12gb", "--gradient_accumulation_steps 4", {"fused_backward_pass"}),
        (FINE_TUNE, "12gb", "--mixed_precision fp16", {"full_bf16"}),
        (FINE_TUNE, "12gb", "--train_text_encoder", {"cache_text_encoder_outputs"}),
        (FINE_TUNE, "12gb", "--learning_rate_te1 1e-5", set()),
        (FINE_TUNE, "16gb", "--fused_backward_pass", {"gradient_release", "master_weights"}),
        (FINE_TUNE, "12gb", "--gradient_release", {"fused_backward_pass"}),
        (FINE_TUNE, "8gb", "--gradient_accumulation_steps 2", {"gradient_release", "optimizer_states_on_host"}),
        (FINE_TUNE, "8gb", "--no-gradient_release", {"optimizer_states_on_host"}),
        (FINE_TUNE, "16gb", "--gradient_accumulation_steps 2", {"gradient_release", "master_weights"}),
        (FINE_TUNE, "16gb", "--no-gradient_release", {"master_weights"}),
        (FINE_TUNE, "16gb", "--no-full_bf16", {"master_weights"}),
        (
            FINE_TUNE,
            "16gb",
            "--optimizer_type AdamWScheduleFree",
            {"master_weights", "learning_rate", "max_grad_norm", "optimizer_args"},
        ),
        (FLUX, "12gb", "--text_encoder_lr 5e-5", {"network_train_unet_only"}),
        (FLUX, "12gb", "--network_args train_t5xxl=True", {"network_train_unet_only", "cache_text_encoder_outputs"}),
        (FLUX, "12gb", "--cpu_offload_checkpointing", {"blocks_to_swap"}),
        (FLUX, "24gb", "--vram_budget 14GB", {"keep_attention"}),
        (FLUX, "48gb", "--no-gradient_checkpointing", {"gradient_checkpointing_ratio", "keep_attention"}),
        (FLUX, "12gb", f"{CHROMA} --text_encoder_lr 5e-5", {"network_train_unet_only", "cache_text_encoder_outputs"}),
        (FLUX, "12gb", f"{CHROMA} --no-network_train_unet_only", {"cache_text_encoder_outputs"}),
        (
            FLUX,
            "12gb",
            f"{CHROMA} --network_args train_t5xxl=True",
            {"network_train_unet_only", "cache_text_encoder_outputs"},
        ),
        ("hunyuan_image_train_network.py", "12gb", "--text_encoder_lr 5e-5", set()),
    ],
)
def test_contradicting_preset_values_are_held_back(script, preset, argv, expected):
    run = CommandLine(Path(script), ["--preset", preset, *argv.split()], {})
    assert set(run.presets.held_back) == expected
    assert not expected & run.presets.values.keys()


#: Option of the user -> keys that a preset then leaves to sd-scripts, with a value that no shipped preset has.
GROUPS = {
    ("network_dim", 3): {"network_alpha"},
    ("network_alpha", 0.5): {"network_dim"},
    ("resolution", "960,960"): {"min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"},
    ("max_bucket_reso", 1792): {"min_bucket_reso", "bucket_reso_steps", "bucket_no_upscale"},
    ("optimizer_type", "Prodigy"): {
        *("optimizer_args", "learning_rate", "max_grad_norm", "fused_backward_pass"),
        *("gradient_release", "optimizer_states_on_host", "master_weights"),
    },
    ("optimizer_args", "decouple=True"): {"optimizer_type", "max_grad_norm", "fused_backward_pass"},
    ("use_lion_optimizer", True): {"optimizer_type", "optimizer_args", "learning_rate", "max_grad_norm", "fused_backward_pass"},
    ("lr_scheduler", "polynomial"): {"lr_warmup_steps", "lr_scheduler_num_cycles", "lr_scheduler_power", "lr_decay_steps"},
    ("lr_scheduler_type", "mine.Scheduler"): {"lr_scheduler", "lr_warmup_steps"},
}

PRESETS = {f"{family}/{name}": scripts(family)[0] for family, name, _ in shipped()}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_leaves_the_rest_of_a_group_to_sd_scripts(preset):
    alone = load([preset], PRESETS[preset]).values.keys()
    for option, group in GROUPS.items():
        run = CommandLine(Path(PRESETS[preset]), ["--preset", preset, *option_words(dict([option]))], {})
        assert not {key for key in group if run.values.get(key)}, option
        assert run.values.keys() >= alone - group - {"enable_bucket"}, option


def test_config_file_and_subsets_hold_values_back(tmp_path):
    config, dataset = tmp_path / "mine.toml", tmp_path / "data.toml"
    config.write_text(f"text_encoder_lr = [1e-5]\ndataset_config = {str(dataset)!r}\n")
    dataset.write_text('[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\n[[datasets.subsets]]\ncolor_aug = true\n')
    left = held_back(LORA, "--preset", "12gb", "--config_file", str(config))
    assert left == {
        "network_train_unet_only": "text_encoder_lr = [1e-05]",
        "cache_text_encoder_outputs": "text_encoder_lr = [1e-05]",
        "cache_latents": "color_aug = True",
    }


def test_reason_names_the_option_and_the_way_out():
    assert held_back(LORA, "--preset", "12gb", "--resolution", "128,128")["enable_bucket"] == (
        "resolution = 128,128: outside the bucket limits; set --enable_bucket, --min_bucket_reso and --max_bucket_reso for it"
    )
    reasons = held_back(LORA, "--preset", "12gb", "--optimizer_type", "Prodigy")
    assert reasons == {"learning_rate": "optimizer_type = Prodigy: set its --learning_rate"}


def test_resolution_of_a_dataset_leaves_out_the_bucket_limits(tmp_path):
    dataset = tmp_path / "data.toml"
    dataset.write_text('[[datasets]]\nresolution = 512\n[[datasets.subsets]]\nimage_dir = "a"\n')
    assert held_back(LORA, "--preset", "12gb", "--dataset_config", str(dataset)) == {"max_bucket_reso": "resolution = 512"}
    dataset.write_text(dataset.read_text().replace("512", "[1024, 1024]"))
    assert held_back(LORA, "--preset", "12gb", "--dataset_config", str(dataset)) == {}


def test_subset_options_override_arguments(tmp_path):
    dataset = tmp_path / "data.toml"
    dataset.write_text('[general]\nshuffle_caption = false\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = "a"\n')
    argv = ["--preset", "12gb", "--shuffle_caption", "--dataset_config", str(dataset)]
    assert held_back(LORA, *argv) == {}


def test_summary_lists_set_and_skipped_values():
    run = CommandLine(Path(LORA), ["--preset", "12gb", "--shuffle_caption"], {})
    line = summary("12gb", {"sdpa": True, "network_dim": 16, "cache_latents": False}, run.presets.held_back)
    assert line == (
        "preset 12gb set sdpa, network_dim=16; skipped cache_text_encoder_outputs (shuffle_caption = True: "
        "--cached_caption_variants 8 would keep it). The run needs more memory than the preset is designed for"
    )
    assert summary("12gb", {"sdpa": True}, {}) == "preset 12gb set sdpa"


def test_switch_that_is_off_in_the_gui_stays_off():
    left = held_back(LORA, "--preset", "12gb", "--config_file", str(GUI / "lora-sdxl.toml"))
    assert left == {
        "network_train_unet_only": "text_encoder_lr = [0.0001, 0.0001]",
        "cache_text_encoder_outputs": "text_encoder_lr = [0.0001, 0.0001]",
        "sdpa": "xformers = True",
        "gradient_checkpointing_ratio": "gradient_checkpointing = False",
        "gradient_checkpointing": "off in the GUI",
    }


def test_switches_that_are_on_in_the_gui_are_not_changed():
    argv = ["--preset", "12gb", "--config_file", str(GUI / "lora-sdxl-unet.toml")]
    presets = CommandLine(Path(LORA), argv, {}).presets
    assert presets.held_back == {}
    gui_values = read_config_file(argv[-1]).values
    assert {key for key in presets.values if key not in gui_values} == {"gradient_checkpointing_ratio", "speed"}


def test_summary_names_the_switches_to_turn_on_in_the_gui():
    run = CommandLine(Path(FLUX), ["--preset", "12gb", "--config_file", str(GUI / "lora-flux.toml")], {})
    line = summary("12gb", {}, run.presets.held_back)
    assert "fp8_base, blocks_to_swap (off in the GUI)" in line
    assert "if it does not fit, turn on cache_text_encoder_outputs, fp8_base, blocks_to_swap in the GUI. To fill in" in line
    assert line.endswith("presets export 12gb --for kohya_ss")


def test_additional_parameters_of_the_gui_override_its_switches():
    argv = ["--preset", "12gb", "--config_file", str(GUI / "lora-sdxl.toml"), "--gradient_checkpointing"]
    run = CommandLine(Path(LORA), argv, {})
    assert not {"gradient_checkpointing", "gradient_checkpointing_ratio"} & run.presets.held_back.keys()
    assert run.settings["gradient_checkpointing_ratio"] == 0.375


def test_number_that_the_gui_writes_as_0_is_off():
    presets = CommandLine(
        Path("flux_train.py"), ["--preset", "12gb", "--config_file", str(GUI / "dreambooth-flux.toml")], {}
    ).presets
    assert presets.held_back["blocks_to_swap"].text == "off in the GUI"


def test_missing_switches_are_unset_in_other_config_files(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text((GUI / "lora-sdxl-unet.toml").read_text().replace('noise_offset_type = "Original"\n', ""))
    file.write_text(file.read_text().replace("gradient_checkpointing = true\n", ""))
    run = CommandLine(Path(LORA), ["--preset", "12gb", "--config_file", str(file)], {})
    assert run.presets.held_back == {}
    assert run.presets.values["gradient_checkpointing"].value is True
