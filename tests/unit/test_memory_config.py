"""Reading a MemoryConfig from a command line, and normalizing it."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kohya_ext.config.command_line import CommandLine
from kohya_ext.errors import UserError
from kohya_ext.estimate.memory_config import FP8, MemoryConfig, normalized, read, sample_size_problem, size, with_bf16

LORA, FLUX = "sdxl_train_network.py", "flux_train_network.py"


def parse(*argv: str, script: str = LORA) -> MemoryConfig:
    return normalized(read(CommandLine(Path(script), argv, {}))[0])


def test_the_command_line_overrides_the_preset() -> None:
    config = parse("--preset", "16gb", "--train_batch_size", "3", "--no-gradient_checkpointing")
    assert (config.train_batch_size, config.gradient_checkpointing, config.network_dim) == (3, False, 16)
    assert size(config) == (1024, 1024)


def test_a_network_that_takes_too_long_is_an_error() -> None:
    with pytest.raises(UserError, match=r"the memory of networks\.boft cannot be estimated"):
        parse("--network_module", "networks.boft", "--resolution", "1024")


@pytest.mark.parametrize(("network", "dim"), [("networks.lora", 4), ("networks.oft", 4), ("networks.oft_v2", 32)])
def test_the_dimension_of_a_network_is_its_default(network: str, dim: int) -> None:
    assert parse("--network_module", network, "--resolution", "1024").network_dim == dim


def test_the_config_file_overrides_the_preset(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("train_batch_size = 7\nnetwork_dim = 64\n")
    config = parse("--preset", "16gb", "--config_file", str(file), "--network_dim", "8")
    assert (config.train_batch_size, config.network_dim) == (7, 8)


def test_a_value_of_the_wrong_type_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('resolution = "512"\ntrain_batch_size = "many"\n')
    with pytest.raises(UserError, match=r"c\.toml: train_batch_size must be a whole number"):
        parse("--config_file", str(file))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--xformers",), ("--sdpa",)),
        (("--cache_latents_to_disk",), ("--cache_latents",)),
        (("--learning_rate", "1e-4"), ("--learning_rate", "3e-5")),
        (("--resolution", "1024"), ("--resolution", "1024,1024", "--enable_bucket")),
        (("--network_alpha", "1"), ("--network_alpha", "16")),
        ((), ("--int8_convolutions",)),
        (("--base_precision", "fp8"), ("--base_precision", "fp8", "--int8_convolutions")),
        (("--output_name", "a"), ("--seed", "3", "--train_data_dir", "x")),
    ],
)
def test_options_of_equal_memory_have_the_same_key(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    resolution = () if "--resolution" in first else ("--resolution", "512")
    assert parse(*resolution, *first).key() == parse(*resolution, *second).key()


@pytest.mark.parametrize(
    "more",
    [
        ("--train_batch_size", "2"), ("--gradient_checkpointing",), ("--network_dim", "32"), ("--optimizer_type", "Lion"),
        ("--optimizer_args", "fused=True"), ("--cache_latents",), ("--mixed_precision", "bf16"), ("--full_bf16",),
        ("--network_train_unet_only",), ("--max_token_length", "225"), ("--gradient_accumulation_steps", "4"),
        ("--base_precision", "int8"), ("--base_precision", "fp8"),
    ],
)  # fmt: skip
def test_options_that_change_memory_change_the_key(more: tuple[str, ...]) -> None:
    assert parse("--resolution", "512").key() != parse("--resolution", "512", *more).key()


def test_8_bit_convolutions_change_the_key_of_an_int8_unet() -> None:
    base = ("--resolution", "512", "--base_precision", "int8")
    assert parse(*base).key() != parse(*base, "--int8_convolutions").key()
    flux = {"script": "flux_train_network.py"}
    assert parse(*base, **flux).key() == parse(*base, "--int8_convolutions", **flux).key()


def test_fp16_has_its_own_key_and_the_shipped_estimates_of_bf16() -> None:
    half = parse("--preset", "8gb", "--mixed_precision", "fp16")
    assert half.mixed_precision == "fp16"
    assert with_bf16(half) == parse("--preset", "8gb", "--mixed_precision", "bf16")


def test_learning_rate_0_is_kept() -> None:
    assert parse("--resolution", "512", "--learning_rate", "0", script="sdxl_train.py").learning_rate == 0
    assert parse("--resolution", "512", "--learning_rate", "1", script="sdxl_train.py").learning_rate != 0


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
    width, height = size(parse(*arguments))
    assert width * height == expected[0] * expected[1]


def test_the_largest_batch_of_a_dataset_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text(
        "[general]\nresolution = 512\nbatch_size = 2\n[[datasets]]\n[[datasets]]\nresolution = [1024, 768]\nbatch_size = 1\n"
    )
    config = parse("--dataset_config", str(file))
    assert (*size(config), config.train_batch_size) == (1024, 768, 1)
    assert config.key() == parse("--resolution", "1024,768").key()


@pytest.mark.parametrize(
    "argv", [(), ("--resolution", "big"), ("--resolution", "1,2,3"), ("--resolution", "0"), ("--dataset_config", "none.toml")]
)
def test_a_missing_or_invalid_resolution_is_a_user_error(argv: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=r"resolution|dataset_config"):
        parse(*argv)


def test_flags_that_change_no_memory_are_returned() -> None:
    argv = ("--resolution", "512", "--output_name", "x", "--seed=3", "--learnign_rate", "1")
    assert read(CommandLine(Path(LORA), argv, {}))[1] == ["--output_name", "--seed", "--learnign_rate"]


def test_a_scripts_own_defaults_have_the_same_key() -> None:
    for script, tokens in (("sd3_train_network.py", "256"), ("flux_train_network.py", "512")):
        bare = parse("--resolution", "512", script=script)
        assert parse("--resolution", "512", "--t5xxl_max_token_length", tokens, script=script) == bare
        assert parse("--resolution", "512", "--sdpa", script=script) == bare
        assert parse("--resolution", "512", "--t5xxl_max_token_length", "128", script=script) != bare


def test_a_text_encoder_in_fp8_counts_if_the_script_keeps_it(tmp_path: Path) -> None:
    flux = ("--resolution", "512", "--t5xxl")
    header = json.dumps({"a.weight": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    file = tmp_path / "t5.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"0")
    for name in (str(file), "t5xxl_fp8_e4m3fn.safetensors"):
        assert parse(*flux, name, "--fp8_base", script="flux_train_network.py").t5xxl == FP8
        assert parse(*flux, name, script="flux_train_network.py").t5xxl is None
        assert parse(*flux, name, "--fp8_base", "--fp8_base_unet", script="flux_train_network.py").t5xxl is None
    assert parse(*flux, "t5xxl_fp16.safetensors", "--fp8_base", script="flux_train_network.py").t5xxl is None
    assert parse("--preset", "8gb", script="flux_train_network.py").t5xxl == FP8
    assert parse("--preset", "8gb", "--t5xxl", "t5xxl_fp16.safetensors", script="flux_train_network.py").t5xxl is None


def test_compiled_blocks_change_the_key_unless_they_run_eager() -> None:
    compiled = ("--resolution", "512", "--selective_torch_compile")
    assert parse(*compiled).selective_torch_compile
    assert parse(*compiled, "--activation_memory_budget", "1") == parse(*compiled)
    assert parse(*compiled, "--activation_memory_budget", "0").activation_memory_budget == 0
    whole = ("--torch_compile", "--activation_memory_budget", "0.5")
    assert parse(*compiled, *whole) == parse("--resolution", "512", "--torch_compile")
    assert parse(*compiled, "--network_args", "module_dropout=0.1").selective_torch_compile is False


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("p.txt", "# --w 2048 --h 2048\na cat --w 768 --h 1024 --s 20\na dog --W 1024\n", "768,1024"),
        ("p.toml", '[prompt]\nwidth = 640\n[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nheight = 1280\n', "640,1280"),
        ("p.json", '[{"prompt": "a", "width": 768, "height": 768}, "b --w 64"]', "768,768"),
        ("none.txt", None, "512,512"),
    ],
)
def test_the_largest_sample_image_counts(tmp_path: Path, name: str, text: str | None, size: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    given = ("--resolution", "512", "--sample_prompts", str(file))
    assert parse(*given) == parse("--resolution", "512"), "prompts alone are not sampled"
    config = parse(*given, "--sample_every_n_epochs", "1")
    assert config.sample_prompts == size
    assert config == parse(*given, "--sample_every_n_steps", "9") == normalized(config)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("none.txt", None, "No such file"),
        ("p.toml", "width = 640\n", "the key 'prompt' is missing"),
        ("p.json", '[{"width": "wide"}]', "invalid literal"),
        ("p.txt", "a cat --w 768\n", None),
    ],
)
def test_unreadable_prompts_are_reported(tmp_path: Path, name: str, text: str | None, why: str | None) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    given = MemoryConfig("sdxl_train.py", sample_prompts=str(file))
    assert sample_size_problem(given) is None, "prompts alone are not sampled"
    problem = sample_size_problem(replace(given, sample_at_first=True))
    assert problem is None if why is None else f"--sample_prompts {file}: {why}" in str(problem)
    assert problem is None or problem.endswith("assuming 512x512 images")


def test_an_average_counts_in_gpu_memory() -> None:
    given = ("--resolution", "512", "--ema")
    assert parse(*given) == parse("--resolution", "512")
    assert parse(*given, "--ema_device", "gpu").ema


def test_a_learning_rate_of_0_is_kept() -> None:
    given = ("--resolution", "512", "--text_encoder_lr")
    assert parse(*given, "1e-5", "1e-4") == parse("--resolution", "512")
    assert parse(*given, "0").text_encoder_lr == (0.0,)
    assert parse("--resolution", "512", "--unet_lr", "0").unet_lr == 0


@pytest.mark.parametrize(
    ("layers", "model"),
    [
        (("joint_blocks.37.x_block.attn.ln_k.weight",), "3.5 large"),
        (("joint_blocks.23.x_block.attn.ln_k.weight",), None),
        (("joint_blocks.23.x_block.attn.qkv.weight",), "3 medium"),
        (None, "3.5 large"),
    ],
)
def test_the_stable_diffusion_3_model_comes_from_the_checkpoint(
    tmp_path: Path, layers: tuple[str, ...] | None, model: str
) -> None:
    file = tmp_path / "sd3.5_large.safetensors"
    if layers is not None:
        rows = {f"model.diffusion_model.{name}": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]} for name in layers}
        header = json.dumps(rows).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    given = ("--resolution", "512", "--pretrained_model_name_or_path", str(file))
    assert parse(*given, script="sd3_train_network.py").pretrained_model_name_or_path == model
    assert parse(*given).pretrained_model_name_or_path is None


@pytest.mark.parametrize(
    ("script", "options", "recorded"),
    [
        (LORA, (), True),
        (LORA, ("--network_dropout", "0.1"), True),
        (LORA, ("--network_dropout", "0.1", "--gradient_checkpointing"), False),
        (LORA, ("--network_args", "module_dropout=0.1"), False),
        ("flux_train_network.py", ("--blocks_to_swap", "4"), False),
        ("lumina_train_network.py", (), False),
        ("sdxl_train.py", (), False),
    ],
)
def test_cuda_graphs_count_where_the_model_is_recorded(script: str, options: tuple[str, ...], recorded: bool) -> None:
    network = () if script == "sdxl_train.py" else ("--network_module", "networks.lora")
    config = parse("--resolution", "512", *network, *options, "--cuda_graphs", script=script)
    assert config.cuda_graphs is recorded
    assert ("cuda_graphs" in config.key()) is recorded


@pytest.mark.parametrize(
    ("script", "options", "key"),
    [
        (FLUX, ("--blocks_to_swap", "4"), None),
        (FLUX, ("--blocks_to_swap", "4", "--no-one_way_block_swap"), False),
        (FLUX, ("--blocks_to_swap", "4", "--speed", "off"), False),
        (FLUX, ("--blocks_to_swap", "4", "--speed", "off", "--one_way_block_swap"), None),
        (FLUX, ("--blocks_to_swap", "4", "--disable_patch", "*"), False),
        (FLUX, ("--no-one_way_block_swap",), None),
        ("flux_train.py", ("--blocks_to_swap", "4", "--no-one_way_block_swap"), None),
    ],
)
def test_the_direction_of_copies_counts_for_swapped_blocks_of_a_lora(
    script: str, options: tuple[str, ...], key: bool | None
) -> None:
    network = ("--network_module", "networks.lora_flux") if script == FLUX else ()
    assert parse("--resolution", "512", *network, *options, script=script).key().get("one_way_block_swap") is key
