"""Loading, stacking and parsing of presets."""

from pathlib import Path

import pytest

from kohya_ext.config import preset_files
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.preset_files import NotForScriptError
from kohya_ext.errors import UserError
from kohya_ext.planning import automatic, tiers

SHIPPED = list(preset_files.shipped())


def test_sdxl_families_have_every_tier_and_quality():
    for family in ("sdxl-lora", "sdxl-finetune"):
        names = {name for folder, name, _ in SHIPPED if folder == family}
        assert names >= {"8gb", "10gb", "12gb", "16gb", "24gb", "quality"}
    assert {name for family, name, _ in SHIPPED if family == preset_files.ANY} == {
        "speed",
        "balanced",
        "quality",
        "fused-adamw",
        "fp16",
    }


@pytest.mark.parametrize(("family", "name", "file"), SHIPPED, ids=[f"{family}/{name}" for family, name, _ in SHIPPED])
def test_shipped_preset_has_summary_tradeoff_and_reasons(family, name, file):
    for script in preset_files.scripts(family):
        preset = preset_files.load([f"{family}/{name}"], script)
        about = preset.presets[-1].about
        assert about["family"] == family
        assert about["summary"]
        assert about["traded"]
        assert all(value.why for value in preset.values.values())
        suffix = "-int8" if about.get("experimental") else ""
        assert ("vram_gb" in about) == (name == f"{about.get('vram_gb')}gb{suffix}")


@pytest.mark.parametrize("name", ["speed", "balanced", "quality"])
def test_common_preset_is_for_every_script_and_needs_no_memory(name):
    for script, family in preset_files.FAMILIES.items():
        assert preset_files.load([name], script).values
        tier = next((f"{folder}/{stem}" for folder, stem, _ in SHIPPED if folder == family and stem.endswith("gb")), None)
        if tier is not None:
            assert tiers.read(script, ["--preset", tier, "--preset", name]) == tiers.read(script, ["--preset", tier])


def test_tier_is_resolved_in_the_scripts_family():
    assert preset_files.load(["16gb"], "sdxl_train.py").label == "sdxl-finetune/16gb"
    assert preset_files.load(["16GB"], "sdxl_train_network.py").label == "sdxl-lora/16gb"


def test_values_of_the_16_gb_fine_tune_preset():
    values = {key: value.value for key, value in preset_files.load(["16gb"], "sdxl_train.py").values.items()}
    assert values["mixed_precision"] == "bf16"
    assert values["train_batch_size"] == 2
    assert values["master_weights"] is True
    assert values["cache_latents"] is True
    assert values["gradient_checkpointing"] is True


def test_tier_without_a_file_is_the_next_smaller_tier():
    assert preset_files.load(["20gb"], "sdxl_train.py").label == "sdxl-finetune/16gb"
    assert preset_files.load(["sdxl-lora/999gb"], "sdxl_train_network.py").presets[-1].about["vram_gb"] >= 24


def test_preset_overrides_those_that_it_extends(tmp_path):
    mine, second = tmp_path / "mine.toml", tmp_path / "second.toml"
    mine.write_text('train_batch_size = 3 # because\n[preset]\nextends = ["sdxl-finetune/16gb"]\n')
    second.write_text('seed = 1 # any\n[preset]\nextends = ["sdxl-finetune/16gb"]\n')
    stacked = preset_files.load([str(mine), str(second)], "sdxl_train.py")
    assert stacked.values["train_batch_size"] == preset_files.Value(3, "because", str(mine))
    assert stacked.values["optimizer_type"].preset.startswith("sdxl-finetune/")
    mine.write_text('[preset]\nextends = ["nothing"]\n')
    with pytest.raises(UserError, match=r"mine\.toml extends nothing, which does not exist"):
        preset_files.load([str(mine)], "sdxl_train.py")


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["12gb", "24gb"], "sdxl-lora/24gb"),
        (["12gb", "quality", "24gb"], "sdxl-lora/quality + sdxl-lora/24gb"),
        (["24gb", "quality", "12gb-int8"], "sdxl-lora/quality + sdxl-lora/12gb-int8"),
    ],
)
def test_a_tier_replaces_a_tier(names, label):
    stacked = preset_files.load(names, "sdxl_train_network.py")
    alone = preset_files.load(label.split(" + "), "sdxl_train_network.py")
    assert (stacked.label, stacked.values) == (label, alone.values)


def test_a_tier_replaces_the_one_that_a_file_extends(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('seed = 1\n[preset]\nextends = ["sdxl-lora/12gb"]\n')
    stacked = preset_files.load([str(mine), "24gb"], "sdxl_train_network.py")
    assert "gradient_checkpointing_ratio" not in stacked.values
    assert stacked.values["seed"].value == 1
    assert "gradient_checkpointing_ratio" in preset_files.load(["24gb", str(mine)], "sdxl_train_network.py").values


def test_later_preset_overrides_earlier_ones(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("train_batch_size = 3 # because\n")
    stacked = preset_files.load(["16gb", str(mine)], "sdxl_train.py")
    assert stacked.values["train_batch_size"] == preset_files.Value(3, "because", str(mine))
    assert stacked.values["master_weights"].preset == "sdxl-finetune/16gb"
    assert preset_files.load([str(mine), "16gb"], "sdxl_train.py").values["train_batch_size"].value == 2


@pytest.mark.parametrize(
    ("names", "script", "message"),
    [
        (["6gb"], "sdxl_train.py", r"no preset 6gb for sdxl_train.py; use 8gb, "),
        (["4gb"], "sdxl_train.py", r"speed \(8gb is the smallest tier\)$"),
        (
            ["12gb"],
            "train_textual_inversion.py",
            r"no preset 12gb for train_textual_inversion.py; use balanced, fp16",
        ),
        (["16gp"], "train_textual_inversion.py", r"no preset 16gp for train_textual_inversion.py; use balanced, "),
        (["24bg"], "sdxl_train.py", r"no preset 24bg for sdxl_train.py; .*Did you mean 24gb\?"),
        (["base"], "sdxl_train.py", "no preset base"),
        (["sdxl-lora/16gb"], "sdxl_train.py", "is for sdxl_train_network.py, not for sdxl_train.py"),
        (["16gb"], "sd3_train.py", "no preset 16gb"),
        (["nowhere.toml"], "sdxl_train.py", "preset file nowhere.toml does not exist"),
    ],
)
def test_unknown_preset_is_an_error_with_the_valid_names(names, script, message):
    with pytest.raises(UserError, match=message):
        preset_files.load(names, script)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "not valid TOML"),
        ("[one]\na = 1\n[two]\na = 2\n", "duplicate key a"),
        ("[one.two]\na = 1\n", "nested too deep"),
        ("[one]\na = 1\n[preset]\n[one.three]\nb = 1", "is split|nested too deep"),
    ],
)
def test_invalid_preset_is_an_error(text, message):
    with pytest.raises(UserError, match=message):
        preset_files.parse(text, "mine.toml", None)


def test_preset_file_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 1 # any\r\n[preset]\r\nextends = ['base']\r\nfamily = 'sdxl-lora'\r\n")
    loaded = preset_files.load([str(file)], "sdxl_train_network.py").values
    assert loaded["seed"] == preset_files.Value(1, "any", str(file))
    assert loaded["network_dim"].value == 16


def test_binary_preset_file_is_an_error(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match=r"mine\.toml is not UTF-8 text"):
        preset_files.load([str(file)], "sdxl_train.py")


def test_a_preset_for_every_script_leaves_out_options_that_a_script_lacks(tmp_path):
    (tmp_path / "train_leco.py").write_text('def setup_parser():\n    parser.add_argument("--lr_scheduler")\n')
    presets = CommandLine(tmp_path / "train_leco.py", ["--preset", "quality"], {}).presets
    assert presets.values.keys() == {"lr_scheduler"}
    assert presets.held_back["lr_warmup_steps"].text == "not an option of train_leco.py"


def _flux_script_before(release, folder):
    """Write a script with the options of a preset, except those of newer releases."""
    options = {"v0.10": ("fp8_base", "model_type"), "2025-07": ("fp8_base",), "2024-08": ("seed",)}[release]
    file = folder / release / "flux_train_network.py"
    file.parent.mkdir()
    file.write_text("def setup_parser():\n" + "".join(f'    parser.add_argument("--{name}")\n' for name in options))
    return file


def test_a_preset_leaves_out_options_that_an_older_release_lacks(tmp_path):
    newer, older = (
        CommandLine(_flux_script_before(release, tmp_path), ["--preset", "24gb"], {}).presets
        for release in ("v0.10", "2024-08")
    )
    assert "fp8_base" in newer.values
    assert "fp8_base" not in older.values
    assert older.held_back["fp8_base"].text == "not an option of flux_train_network.py"
    assert older.held_back["fp8_base"].costs_memory


def test_a_users_own_preset_with_an_unknown_option_keeps_it_for_the_error(tmp_path):
    (tmp_path / "mine.toml").write_text("[a]\nfp8_bsae = true\n")
    presets = CommandLine(_flux_script_before("v0.10", tmp_path), ["--preset", str(tmp_path / "mine.toml")], {}).presets
    assert "fp8_bsae" in presets.values


def test_a_preset_for_a_model_that_a_release_cannot_train_is_an_error(tmp_path):
    for release in ("v0.10", "2025-07"):
        command = CommandLine(_flux_script_before(release, tmp_path), ["--preset", "chroma-lora/16gb"], {})
        if release == "v0.10":
            assert command.presets.values["model_type"].value == "chroma"
        else:
            with pytest.raises(UserError, match="has no --model_type; use a newer release of sd-scripts"):
                _ = command.presets


@pytest.mark.parametrize("name", ["12gb", "auto", "sdxl-lora/16gb", "99gb"])
def test_a_preset_of_the_environment_that_does_not_apply_is_a_remark(name):
    script = Path("train_textual_inversion.py")
    presets = CommandLine(script, [], {"KOHYA_EXT_PRESET": f"{name},quality", "KOHYA_EXT_VRAM": "12"}, automatic).presets
    assert presets.label == "any/quality"
    (remark,) = presets.remarks
    assert remark.startswith("KOHYA_EXT_PRESET: ")
    assert remark.endswith("; training without it")
    with pytest.raises(NotForScriptError):
        _ = CommandLine(script, ["--preset", name, "--vram", "12"], {}, automatic).presets


def test_a_misspelt_preset_of_the_environment_is_an_error():
    with pytest.raises(UserError, match="no preset 12bg for train_textual_inversion"):
        _ = CommandLine(Path("train_textual_inversion.py"), [], {"KOHYA_EXT_PRESET": "12bg"}, automatic).presets
