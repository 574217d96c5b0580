from dataclasses import replace

import pytest

from kohya_ext.config import preset_files
from kohya_ext.errors import UserError
from kohya_ext.planning import tiers

SHIPPED = list(preset_files.shipped())


def test_both_first_families_have_every_tier_and_a_stackable_one():
    for family in ("sdxl-lora", "sdxl-finetune"):
        names = {name for its, name, _ in SHIPPED if its == family}
        assert names >= {"10gb", "12gb", "16gb", "24gb", "quality"}
    assert {name for its, name, _ in SHIPPED if its == preset_files.ANY} == {"speed", "balanced", "quality", "fused-adamw"}


@pytest.mark.parametrize(("family", "name", "file"), SHIPPED, ids=[f"{family}/{name}" for family, name, _ in SHIPPED])
def test_a_shipped_preset_says_what_it_is_what_was_traded_and_why(family, name, file):
    for script in preset_files.scripts(family):
        preset = preset_files.load([f"{family}/{name}"], script)
        about = preset.presets[-1].about
        assert about["family"] == family
        assert about["summary"]
        assert about["traded"]
        assert all(value.why for value in preset.values.values())
        assert ("vram_gb" in about) == (name == f"{about.get('vram_gb')}gb")


@pytest.mark.parametrize("name", ["speed", "balanced", "quality"])
def test_an_overlay_goes_with_every_script_and_costs_no_memory(name):
    for script, family in preset_files.FAMILIES.items():
        assert preset_files.load([name], script).values
        tier = next((f"{its}/{stem}" for its, stem, _ in SHIPPED if its == family and stem.endswith("gb")), None)
        if tier is not None:
            stacked = tiers.read(script, ["--preset", tier, "--preset", name])
            # Compiled blocks and fused operations, `speed`'s, need less than the tier was measured with.
            assert replace(stacked, selective_torch_compile=False, fused_operations=False) == tiers.read(
                script, ["--preset", tier]
            )


def test_a_tier_means_the_scripts_own_family():
    assert preset_files.load(["16gb"], "sdxl_train.py").label == "sdxl-finetune/16gb"
    assert preset_files.load(["16GB"], "sdxl_train_network.py").label == "sdxl-lora/16gb"


def test_the_users_own_16_gb_settings_are_the_fine_tune_preset():
    values = {key: value.value for key, value in preset_files.load(["16gb"], "sdxl_train.py").values.items()}
    assert values["mixed_precision"] == "bf16"
    assert values["train_batch_size"] == 1
    assert values["gradient_accumulation_steps"] == 2
    assert values["cache_latents"] is True
    assert values["gradient_checkpointing"] is True


def test_a_tier_without_a_file_is_the_next_smaller_one():
    assert preset_files.load(["20gb"], "sdxl_train.py").label == "sdxl-finetune/16gb"
    assert preset_files.load(["sdxl-lora/999gb"], "sdxl_train_network.py").presets[-1].about["vram_gb"] >= 24


def test_a_preset_lies_over_what_it_extends_and_its_values_say_which_set_them(tmp_path):
    mine, second = tmp_path / "mine.toml", tmp_path / "second.toml"
    mine.write_text('train_batch_size = 3 # because\n[preset]\nextends = ["sdxl-finetune/16gb"]\n')
    second.write_text('seed = 1 # any\n[preset]\nextends = ["sdxl-finetune/16gb"]\n')
    stacked = preset_files.load([str(mine), str(second)], "sdxl_train.py")
    assert stacked.values["train_batch_size"] == preset_files.Value(3, "because", str(mine))
    assert stacked.values["optimizer_type"].preset.startswith("sdxl-finetune/")
    mine.write_text('[preset]\nextends = ["nothing"]\n')
    with pytest.raises(UserError, match=r"mine\.toml extends nothing, which is not there"):
        preset_files.load([str(mine)], "sdxl_train.py")


def test_the_later_of_two_presets_wins(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("train_batch_size = 3 # because\n")
    stacked = preset_files.load(["16gb", str(mine)], "sdxl_train.py")
    assert stacked.values["train_batch_size"] == preset_files.Value(3, "because", str(mine))
    assert stacked.values["gradient_accumulation_steps"].preset == "sdxl-finetune/16gb"
    assert preset_files.load([str(mine), "16gb"], "sdxl_train.py").values["train_batch_size"].value == 1


@pytest.mark.parametrize(
    ("names", "script", "message"),
    [
        (["6gb"], "sdxl_train.py", r"no preset 6gb for sdxl_train.py: there are 10gb, "),
        (["4gb"], "sdxl_train.py", r"fused-adamw, speed; 10gb is the smallest tier$"),
        (["balanced"], "train_textual_inversion.py", r"not for train_textual_inversion\.py\.$"),
        (["24bg"], "sdxl_train.py", r"no preset 24bg for sdxl_train.py: .*Did you mean 24gb\?"),
        (["base"], "sdxl_train.py", "no preset base"),
        (["sdxl-lora/16gb"], "sdxl_train.py", "is for sdxl_train_network.py, not for sdxl_train.py"),
        (["16gb"], "sd3_train.py", "no preset 16gb"),
        (["nowhere.toml"], "sdxl_train.py", "no preset file nowhere.toml"),
    ],
)
def test_a_preset_that_cannot_be_had_is_answered_with_those_that_can(names, script, message):
    with pytest.raises(UserError, match=message):
        preset_files.load(names, script)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "not valid TOML"),
        ("[one]\na = 1\n[two]\na = 2\n", "says a twice"),
        ("[one.two]\na = 1\n", "nested too deep"),
        ("[one]\na = 1\n[preset]\n[one.three]\nb = 1", "two places|nested too deep"),
    ],
)
def test_a_broken_preset_is_named(text, message):
    with pytest.raises(UserError, match=message):
        preset_files.parse(text, "mine.toml", None)


def test_a_preset_file_may_have_a_byte_order_mark_and_windows_line_ends(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 1 # any\r\n[preset]\r\nextends = ['base']\r\nfamily = 'sdxl-lora'\r\n")
    loaded = preset_files.load([str(file)], "sdxl_train_network.py").values
    assert loaded["seed"] == preset_files.Value(1, "any", str(file))
    assert loaded["network_dim"].value == 16


def test_a_preset_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match=r"mine\.toml is not a text file in UTF-8"):
        preset_files.load([str(file)], "sdxl_train.py")
