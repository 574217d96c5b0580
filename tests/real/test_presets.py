"""Presets and the GUI's config files against upstream's parsers, buckets and runs."""

import itertools
import re
from pathlib import Path

import pytest

from kohya_ext.config import preset_files
from kohya_ext.preflight.buckets import Buckets
from kohya_ext.tiny import dataset

pytest.importorskip("torch")

GUI = Path(__file__).parent.parent / "data" / "gui"

#: Config file of the GUI -> the script that the GUI starts with it.
GUI_SCRIPTS = {
    "lora-sd15": "train_network.py",
    "lora-sdxl": "sdxl_train_network.py",
    "lora-sdxl-boxes": "sdxl_train_network.py",
    "lora-sdxl-unet": "sdxl_train_network.py",
    "lora-flux": "flux_train_network.py",
    "lora-chroma": "flux_train_network.py",
    "lora-sd3": "sd3_train_network.py",
    "lora-hunyuan-image": "hunyuan_image_train_network.py",
    "lora-anima": "anima_train_network.py",
    "lora-lumina": "lumina_train_network.py",
    "dreambooth-sd15": "train_db.py",
    "dreambooth-sdxl": "sdxl_train.py",
    "dreambooth-flux": "flux_train.py",
    "dreambooth-sd3": "sd3_train.py",
    "finetune-sd15": "fine_tune.py",
    "finetune-sdxl": "sdxl_train.py",
    "finetune-flux": "flux_train.py",
    "finetune-anima": "anima_train.py",
    "finetune-lumina": "lumina_train.py",
    "textual-inversion-sd15": "train_textual_inversion.py",
    "textual-inversion-sdxl": "sdxl_train_textual_inversion.py",
    "lllite-anima": "anima_train_control_net_lllite.py",
}

CHECK_FILES = """
import sys
from pathlib import Path
from kohya_ext.config.arguments import complete, find_problems
from kohya_ext.config.user_files import read_config_file
from kohya_ext.sdscripts.introspect import script_parser
from kohya_ext.sdscripts.checkouts import describe

checkout = describe(Path(sys.argv[1]), "named")
parsers = {}
for file, script in zip(sys.argv[2::2], sys.argv[3::2]):
    if script not in parsers:
        parsers[script] = script_parser(checkout, checkout.script(script))
        complete(parsers[script])
    for problem in find_problems(parsers[script], read_config_file(file)):
        print(f"PROBLEM {file} with {script}: {problem}")
    print("CHECKED")
"""


def test_every_gui_file_is_tested():
    assert {file.stem for file in GUI.glob("*.toml")} == GUI_SCRIPTS.keys()


@pytest.mark.newest
def test_gui_files_give_no_warning(checkout, call):
    scripts = {name: script for name, script in GUI_SCRIPTS.items() if (checkout.path / script).is_file()}
    words = [word for name, script in scripts.items() for word in (str(GUI / f"{name}.toml"), script)]
    done = call("-c", CHECK_FILES, checkout.path, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "PROBLEM" not in done.stdout, done.stdout
    assert done.stdout.count("CHECKED") == len(scripts) >= len(GUI_SCRIPTS) - 1


@pytest.mark.newest
def test_start_from_the_gui_keeps_its_switches(checkout, train, tmp_path):
    """The GUI passes only its config file; this test adds the tiny model's arguments."""
    config = tmp_path / "config_lora-20260101-120000.toml"
    config.write_text((GUI / "lora-sdxl-unet.toml").read_text())
    paths = ("--config_file", str(config), "--sample_prompts", "", "--save_precision", "float", "--network_train_unet_only")
    env = {"KOHYA_EXT_PRESET": "12gb"}
    run = train(checkout, "sdxl_train_network.py", *paths, start="environment", env=env)
    assert run.code == 0, run.output[-4000:]
    messages = [line for line in run.output.splitlines() if line.startswith("kohya_ext: ")]
    assert not [line for line in messages if "must be" in line or "unknown key" in line]
    assert [line for line in messages if "preset sdxl-lora/12gb set" in line] == [
        "kohya_ext: preset sdxl-lora/12gb set speed=auto, gradient_checkpointing_ratio=0.375"
    ]


@pytest.mark.newest
def test_preset_does_not_override_text_encoder_training_and_shuffled_captions(checkout, train, tmp_path):
    (tmp_path / "mine.toml").write_text("text_encoder_lr = [1e-5]\nshuffle_caption = true\n")
    run = train(checkout, "sdxl_train_network.py", "--preset", "12gb", "--config_file", str(tmp_path / "mine.toml"))
    assert run.code == 0, run.output[-4000:]
    assert "skipped network_train_unet_only, cache_text_encoder_outputs (text_encoder_lr = [1e-05])" in run.output
    assert {name.split("_")[1] for name in run.tensors} == {"unet", "te1", "te2"}


def test_rank_of_a_gui_keeps_sd_scripts_alpha(checkout, train):
    """fluxgym gives --network_dim and no --network_alpha: sd-scripts' default of 1, not the preset's 16."""
    from safetensors.torch import load_file

    usual = ("--network_dim", "4", "--network_alpha", "1", "--train_batch_size", "--seed", "--max_train_steps")
    more = ("--network_dim", "4", "--train_batch_size", "1", "--seed", "1", "--max_train_steps", "4")
    env = {"KOHYA_EXT_PRESET": "12gb"}
    run = train(checkout, "sdxl_train_network.py", *more, without=usual, start="environment", env=env)
    assert run.code == 0, run.output[-4000:]
    assert "skipped network_alpha (network_dim = 4)" in run.output
    alphas = {float(value) for name, value in load_file(run.file).items() if name.endswith(".alpha")}
    assert alphas == {1.0}


@pytest.mark.newest
def test_presets_of_the_environment_do_not_end_a_script_without_presets(checkout, train):
    env = {"KOHYA_EXT_PRESET": "12gb,quality"}
    run = train(checkout, "train_textual_inversion.py", start="environment", env=env)
    assert run.code == 0, run.output[-4000:]
    assert "warning: KOHYA_EXT_PRESET: no preset 12gb for train_textual_inversion.py; use balanced, " in run.output
    assert "training without it" in run.output
    assert "preset any/quality set lr_scheduler=cosine, lr_warmup_steps=100" in run.output


# --- buckets ---------------------------------------------------------------------------------------------------------

#: SDXL's usual training sizes, which have multiples of 64 as sides.
SIZES = ((1024, 1024), (896, 1152), (832, 1216), (768, 1344), (640, 1536), (512, 2048))


def test_presets_keep_the_pixels_of_images_that_are_not_square(checkout, checkout_module):
    manager = checkout_module("library.train_util").BucketManager
    bases = [
        base
        for family in {*preset_files.FAMILIES.values(), *preset_files.SIBLINGS}
        if (base := preset_files.base(family)) is not None
    ]
    assert len(bases) == 10
    for values in ({key: value.value for key, value in base.values.items()} for base in bases):
        default = int(values["resolution"].split(",")[0])
        for resolution in (512, 768, default):
            buckets = manager(False, (resolution, resolution), 256, values["max_bucket_reso"], 64)
            buckets.make_buckets()
            for width, height in (size for size in SIZES if min(size) * resolution // 1024 >= 256):
                for size in ((width, height), (height, width)):
                    (bucket_width, bucket_height), _, _ = buckets.select_bucket(*(side * 3 for side in size))
                    assert bucket_width * bucket_height > 0.9 * resolution**2
            if resolution == 1024:
                assert all(buckets.select_bucket(*size)[0] == size for size in SIZES)


@pytest.mark.parametrize("no_upscale", [False, True])
def test_preflight_buckets_equal_upstreams(checkout, checkout_module, no_upscale):
    manager = checkout_module("library.train_util").BucketManager
    for resolution, limits in (((1024, 1024), (256, 2048, 64)), ((512, 768), (256, 1024, 32)), ((1000, 1000), (256, 1024, 64))):
        theirs = manager(no_upscale, resolution, *limits)
        if not no_upscale:
            theirs.make_buckets()
        ours = Buckets(resolution, True, no_upscale, *limits)
        for size in itertools.product(range(256, 3000, 213), repeat=2):
            assert ours.bucket(size) == theirs.select_bucket(*size)[0], (resolution, limits, size)


def test_upstreams_default_discards_pixels(checkout, checkout_module):
    """Show that test_presets_keep_the_pixels_of_images_that_are_not_square can fail."""
    buckets = checkout_module("library.train_util").BucketManager(False, (1024, 1024), 256, 1024, 64)
    buckets.make_buckets()
    assert buckets.select_bucket(832, 1216)[0] == (704, 1024)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_of_an_epoch_with_regularisation_images_equal_upstreams(checkout, train, tmp_path):
    dataset.write(tmp_path, 3, 128)
    folder = tmp_path / dataset.CLASS
    folder.rename(tmp_path / "2_cat")
    more = ("--reg_data_dir", str(tmp_path), "--train_batch_size", "2", "--max_train_epochs", "1")
    run = train(checkout, "sdxl_train_network.py", *more)
    assert run.code == 0, run.output[-4000:]
    (predicted,) = re.findall(r"about (\d+) steps per epoch", run.output)
    (actual,) = re.findall(r"total optimization steps / \S+: (\d+)", run.output)
    assert predicted == actual
