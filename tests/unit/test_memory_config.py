"""What of a command line determines its memory."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate.memory_config import FP8, MemoryConfig, normalized, read, size, unread_samples

LORA = "sdxl_train_network.py"


def ask(*argv: str, script: str = LORA) -> MemoryConfig:
    return normalized(read(CommandLine(Path(script), argv, {}))[0])


def test_a_presets_values_are_read_and_the_command_line_wins() -> None:
    asked = ask("--preset", "16gb", "--train_batch_size", "3", "--no-gradient_checkpointing")
    assert (asked.train_batch_size, asked.gradient_checkpointing, asked.network_dim) == (3, False, 16)
    assert size(asked) == (1024, 1024)


def test_the_config_file_stands_between_them(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("train_batch_size = 7\nnetwork_dim = 64\n")
    asked = ask("--preset", "16gb", "--config_file", str(file), "--network_dim", "8")
    assert (asked.train_batch_size, asked.network_dim) == (7, 8)


def test_a_value_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('resolution = "512"\ntrain_batch_size = "many"\n')
    with pytest.raises(UserError, match=r"c\.toml: train_batch_size must be a whole number"):
        ask("--config_file", str(file))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("--mixed_precision", "fp16"), ("--mixed_precision", "bf16")),
        (("--xformers",), ("--sdpa",)),
        (("--cache_latents_to_disk",), ("--cache_latents",)),
        (("--learning_rate", "1e-4"), ("--learning_rate", "3e-5")),
        (("--resolution", "1024"), ("--resolution", "1024,1024", "--enable_bucket")),
        (("--network_alpha", "1"), ("--network_alpha", "16")),
        (("--output_name", "a"), ("--seed", "3", "--train_data_dir", "x")),
    ],
)
def test_what_costs_the_same_is_the_same_question(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    resolution = () if "--resolution" in one else ("--resolution", "512")
    assert ask(*resolution, *one).key() == ask(*resolution, *other).key()


@pytest.mark.parametrize(
    "more",
    [
        ("--train_batch_size", "2"), ("--gradient_checkpointing",), ("--network_dim", "32"), ("--optimizer_type", "Lion"),
        ("--optimizer_args", "fused=True"), ("--cache_latents",), ("--mixed_precision", "bf16"), ("--full_bf16",),
        ("--network_train_unet_only",), ("--max_token_length", "225"), ("--gradient_accumulation_steps", "4"),
    ],
)  # fmt: skip
def test_what_costs_memory_is_another_question(more: tuple[str, ...]) -> None:
    assert ask("--resolution", "512").key() != ask("--resolution", "512", *more).key()


def test_learning_rate_0_trains_nothing_of_the_unet() -> None:
    assert ask("--resolution", "512", "--learning_rate", "0", script="sdxl_train.py").learning_rate == 0
    assert ask("--resolution", "512", "--learning_rate", "1", script="sdxl_train.py").learning_rate != 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--resolution", "1024"), (1024, 1024)),
        (("--resolution", "1024,768"), (1024, 768)),
        (("--resolution", "1000", "--enable_bucket"), (960, 1024)),
        (("--resolution", "768,512", "--enable_bucket", "--max_bucket_reso", "1024"), (768, 512)),
    ],
)
def test_the_largest_bucket_counts(arguments: tuple[str, ...], expected: tuple[int, int]) -> None:
    width, height = size(ask(*arguments))
    assert width * height == expected[0] * expected[1]


def test_the_largest_batch_of_a_dataset_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text(
        "[general]\nresolution = 512\nbatch_size = 2\n[[datasets]]\n[[datasets]]\nresolution = [1024, 768]\nbatch_size = 1\n"
    )
    asked = ask("--dataset_config", str(file))
    assert (*size(asked), asked.train_batch_size) == (1024, 768, 1)
    assert asked.key() == ask("--resolution", "1024,768").key()


@pytest.mark.parametrize(
    "argv", [(), ("--resolution", "big"), ("--resolution", "1,2,3"), ("--resolution", "0"), ("--dataset_config", "none.toml")]
)
def test_a_resolution_that_cannot_be_known_is_a_user_error(argv: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"resolution|dataset_config"):
        ask(*argv)


def test_flags_that_cost_nothing_are_handed_back() -> None:
    argv = ("--resolution", "512", "--output_name", "x", "--seed=3", "--learnign_rate", "1")
    assert read(CommandLine(Path(LORA), argv, {}))[1] == ["--output_name", "--seed", "--learnign_rate"]


def test_what_a_script_assumes_by_itself_is_the_same_question() -> None:
    for script, tokens in (("sd3_train_network.py", "256"), ("flux_train_network.py", "512")):
        bare = ask("--resolution", "512", script=script)
        assert ask("--resolution", "512", "--t5xxl_max_token_length", tokens, script=script) == bare
        assert ask("--resolution", "512", "--sdpa", script=script) == bare
        assert ask("--resolution", "512", "--t5xxl_max_token_length", "128", script=script) != bare


def test_a_text_encoder_in_fp8_counts_where_the_script_leaves_it_so(tmp_path: Path) -> None:
    flux = ("--resolution", "512", "--t5xxl")
    header = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "t5.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"0")
    for name in (str(file), "t5xxl_fp8_e4m3fn.safetensors"):
        assert ask(*flux, name, "--fp8_base", script="flux_train_network.py").t5xxl == FP8
        assert ask(*flux, name, script="flux_train_network.py").t5xxl is None
        assert ask(*flux, name, "--fp8_base", "--fp8_base_unet", script="flux_train_network.py").t5xxl is None
    assert ask(*flux, "t5xxl_fp16.safetensors", "--fp8_base", script="flux_train_network.py").t5xxl is None
    assert ask("--preset", "8gb", script="flux_train_network.py").t5xxl == FP8
    assert ask("--preset", "8gb", "--t5xxl", "t5xxl_fp16.safetensors", script="flux_train_network.py").t5xxl is None


def test_compiled_blocks_are_another_question_unless_something_stands_in_their_way() -> None:
    compiled = ("--resolution", "512", "--selective_torch_compile")
    assert ask(*compiled).selective_torch_compile
    assert ask(*compiled, "--activation_memory_budget", "1") == ask(*compiled)
    assert ask(*compiled, "--activation_memory_budget", "0").activation_memory_budget == 0
    whole = ("--torch_compile", "--activation_memory_budget", "0.5")
    assert ask(*compiled, *whole) == ask("--resolution", "512", "--torch_compile")
    assert ask(*compiled, "--network_args", "module_dropout=0.1").selective_torch_compile is False


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("p.txt", "# --w 2048 --h 2048\na cat --w 768 --h 1024 --s 20\na dog --W 1024\n", "768,1024"),
        ("p.toml", '[prompt]\nwidth = 640\n[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nheight = 1280\n', "640,1280"),
        ("p.json", '[{"prompt": "a", "width": 768, "height": 768}, "b --w 64"]', "768,768"),
        ("none.txt", None, "512,512"),
    ],
)
def test_the_largest_picture_that_is_sampled_counts(tmp_path: Path, name: str, text: str | None, size: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    given = ("--resolution", "512", "--sample_prompts", str(file))
    assert ask(*given) == ask("--resolution", "512"), "prompts alone are not sampled"
    asked = ask(*given, "--sample_every_n_epochs", "1")
    assert asked.sample_prompts == size
    assert asked == ask(*given, "--sample_every_n_steps", "9") == normalized(asked)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("none.txt", None, "No such file"),
        ("p.toml", "width = 640\n", "there is no 'prompt' in it"),
        ("p.json", '[{"width": "wide"}]', "invalid literal"),
        ("p.txt", "a cat --w 768\n", None),
    ],
)
def test_prompts_that_cannot_be_read_are_said(tmp_path: Path, name: str, text: str | None, why: str | None) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    given = MemoryConfig("sdxl_train.py", sample_prompts=str(file))
    assert unread_samples(given) is None, "prompts alone are not sampled"
    said = unread_samples(replace(given, sample_at_first=True))
    assert said is None if why is None else f"--sample_prompts {file}: {why}" in str(said)
    assert said is None or said.endswith("its pictures are taken to be 512x512")


def test_an_average_counts_where_it_lies_on_the_card() -> None:
    given = ("--resolution", "512", "--ema")
    assert ask(*given) == ask("--resolution", "512")
    assert ask(*given, "--ema_device", "gpu").ema


def test_a_rate_of_0_leaves_a_part_of_a_network_out() -> None:
    given = ("--resolution", "512", "--text_encoder_lr")
    assert ask(*given, "1e-5", "1e-4") == ask("--resolution", "512")
    assert ask(*given, "0").text_encoder_lr == (0.0,)
    assert ask("--resolution", "512", "--unet_lr", "0").unet_lr == 0


@pytest.mark.parametrize(
    ("layers", "model"),
    [
        (("joint_blocks.37.x_block.attn.ln_k.weight",), "3.5 large"),
        (("joint_blocks.23.x_block.attn.ln_k.weight",), None),
        (("joint_blocks.23.x_block.attn.qkv.weight",), "3 medium"),
        (None, "3.5 large"),
    ],
)
def test_which_stable_diffusion_3_it_is_the_checkpoint_says(tmp_path: Path, layers: tuple[str, ...] | None, model: str) -> None:
    file = tmp_path / "sd3.5_large.safetensors"
    if layers is not None:
        rows = {f"model.diffusion_model.{name}": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]} for name in layers}
        header = json.dumps(rows).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    given = ("--resolution", "512", "--pretrained_model_name_or_path", str(file))
    assert ask(*given, script="sd3_train_network.py").pretrained_model_name_or_path == model
    assert ask(*given).pretrained_model_name_or_path is None
