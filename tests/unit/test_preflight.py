"""The checks of preflight on files and arguments."""

import importlib.util
import json
import math
import os
import shutil
import struct
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kohya_ext import installed_gpus, preflight
from kohya_ext.commands import check as check_command
from kohya_ext.config import training_command
from kohya_ext.config.command_line import CommandLine
from kohya_ext.config.settings import Settings
from kohya_ext.config.training_command import Question
from kohya_ext.installed_gpus import InstalledGpu
from kohya_ext.preflight import captions, data, hub, models, numbers, options, output
from kohya_ext.run import run_record
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.sdscripts import families
from kohya_ext.sdscripts.checkouts import Checkout

image = pytest.importorskip("PIL.Image")


def check(run, script="sdxl_train_network.py", settings=None, **args):
    findings = preflight.Findings()
    more = {"settings": settings or Settings()} if run in (output.check, models.check, data.check) else {}
    run(Path("/sd-scripts") / script, Namespace(**args), findings, **more)
    return findings


@pytest.fixture
def denied(monkeypatch):
    """Deny the creation of files, as Windows does in some folders."""

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    return lambda: monkeypatch.setattr(os, "open", refuse)


def write_safetensors(file, names, missing_bytes=0):
    rows = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)}
    header = json.dumps(rows).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4 * len(names))
    file.write_bytes(content[: len(content) - missing_bytes])
    return file


# --- model files -----------------------------------------------------------------------------------------------------


def test_safetensors_header_is_read(tmp_path):
    header = read_header(write_safetensors(tmp_path / "x.safetensors", ["a", "b"]))
    assert header.shapes == {"a": (1,), "b": (1,)}


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "0 bytes"), (b"hello world, this is text", "not a safetensors"), (b"12", "not a safetensors")],
)
def test_invalid_safetensors_file_is_an_error(tmp_path, content, expected):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        read_header(tmp_path / "x.safetensors")


def test_truncated_safetensors_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="truncated"):
        read_header(write_safetensors(tmp_path / "x.safetensors", ["a"], missing_bytes=1))


@pytest.mark.parametrize(
    ("tensor", "script", "more", "expected"),
    [
        ("cond_stage_model.transformer.x", "sdxl_train.py", {}, "of SD 1.5, but sdxl_train.py trains SDXL; use fine_tune.py"),
        ("conditioner.embedders.1.model.x", "train_network.py", {}, "trains SD 1.5; use sdxl_train_network.py"),
        ("cond_stage_model.model.x", "train_network.py", {"v2": False}, "of SD 2, but train_network.py trains SD 1.5"),
        ("cond_stage_model.model.x", "train_network.py", {"v2": True}, None),
        ("model.diffusion_model.double_blocks.0.img_attn.x", "flux_train_network.py", {}, None),
        ("distilled_guidance_layer.x", "flux_train_network.py", {}, "Chroma"),
        ("distilled_guidance_layer.x", "flux_train_network.py", {"model_type": "chroma"}, None),
        ("distilled_guidance_layer.x", "sdxl_train.py", {}, "use flux_train_network.py --model_type chroma"),
        ("double_blocks.0.img_attn.x", "flux_train_network.py", {"model_type": "chroma"}, "trains Chroma"),
        ("byt5_in.x", "anima_train_network.py", {}, "of HunyuanImage, but anima_train_network.py trains Anima"),
        ("byt5_in.x", "sdxl_train.py", {}, "trains SDXL; use hunyuan_image_train_network.py"),
        ("byt5_in.x", "hunyuan_image_train_network.py", {}, None),
        ("net.llm_adapter.x", "lumina_train.py", {}, "of Anima, but lumina_train.py trains Lumina; use anima_train.py"),
        ("net.llm_adapter.x", "anima_train.py", {}, None),
        ("conditioner.embedders.1.model.x", "hunyuan_image_train_network.py", {}, "trains HunyuanImage"),
        ("conditioner.embedders.1.model.x", "train_textual_inversion.py", {}, "trains SD 1.5; use sdxl_train.py"),
        ("lora_unet_x.lora_down.weight", "sdxl_train.py", {}, "is a LoRA"),
        ("something.else", "sdxl_train.py", {}, None),
    ],
)
def test_checkpoint_of_another_family_is_an_error(tmp_path, tensor, script, more, expected):
    file = write_safetensors(tmp_path / "model.safetensors", [tensor])
    errors = check(models.check, script, pretrained_model_name_or_path=str(file), **more).errors
    errors = [error for error in errors if " is missing: " not in error]
    assert (expected is None and not errors) or (len(errors) == 1 and expected in errors[0])


def _scaled(folder):
    """Write an SDXL checkpoint of one weight in fp8 with scales."""
    rows = {
        "conditioner.embedders.1.model.x.weight": {"dtype": "F8_E4M3", "shape": [4, 4], "data_offsets": [0, 16]},
        "conditioner.embedders.1.model.x.weight_scale": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]},
    }
    header = json.dumps(rows).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(20))
    return str(file)


def test_weights_in_8_bits_with_scales_need_their_reader(tmp_path):
    file = _scaled(tmp_path)
    findings = check(models.check, pretrained_model_name_or_path=file)
    assert findings.notes == ["model.safetensors has 1 weights in fp8 with scales, which are applied"]
    assert not findings.errors
    for patches in (("scaled_checkpoints",), ("*",)):
        settings = Settings(disable_patch=patches)
        (error,) = check(models.check, settings=settings, pretrained_model_name_or_path=file).errors
        assert error.startswith("model.safetensors has 1 weights in fp8 with scales, which sd-scripts would read without them")
    (error,) = check(models.check, pretrained_model_name_or_path=file, disable_mmap_load_safetensors=True).errors
    assert "remove --disable_mmap_load_safetensors" in error
    warnings = check(models.check, pretrained_model_name_or_path=file, fp8_base=True).warnings
    assert "use --base_precision fp8" in warnings[-1]
    files = {"pretrained_model_name_or_path": "owner/name", "t5xxl": file}
    errors = check(models.check, "flux_train.py", settings=settings, **files).errors
    assert any("which sd-scripts would read without them" in error for error in errors)


@pytest.mark.parametrize("option", ["pretrained_model_name_or_path", "network_weights", "base_weights"])
@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        ({}, 0, "has no tensors"),
        ({"__metadata__": {"a": "b"}}, 0, "has no tensors"),
        ({"lora_a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 8, "has bytes that belong to no tensor"),
        ({"lora_a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, 4, "has tensors of the type X9, which cannot"),
        ({"lora_a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3, "of the type F6_E2M3"),
        ({"lora_a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}, 4, None),
    ],
)
def test_files_that_safetensors_or_torch_cannot_read_are_errors(tmp_path, option, rows, size, expected):
    header = json.dumps(rows).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
    given = [str(file)] if option == "base_weights" else str(file)
    errors = check(models.check, "sdxl_train_network.py", **{option: given}).errors
    named = [error for error in errors if error.startswith(f"--{option} {file} has ")]
    assert [expected in error for error in named] == [True] * (expected is not None)


@pytest.mark.parametrize("args", [{"disable_mmap_load_safetensors": True}, {"script": "anima_train_network.py"}])
def test_a_file_with_more_bytes_is_a_warning_where_sd_scripts_reads_it_itself(tmp_path, args):
    file = write_safetensors(tmp_path / "x.safetensors", ["net.llm_adapter.x"])
    file.write_bytes(file.read_bytes() + b"more")
    findings = check(models.check, pretrained_model_name_or_path=str(file), **args)
    assert any("bytes that belong to no tensor" in line for line in findings.warnings)
    assert not any("bytes that belong to no tensor" in line for line in findings.errors)


@pytest.mark.parametrize(("name", "start"), [("model.gguf", b"GGUF"), ("model.safetensors", b"GGUF")])
def test_gguf_is_an_error(tmp_path, name, start):
    file = tmp_path / name
    file.write_bytes(start + bytes(100))
    (error,) = check(models.check, pretrained_model_name_or_path=str(file)).errors
    assert "is a GGUF file, which cannot be read; download the checkpoint in bf16, fp16, fp8 or int8" in error


def test_other_formats_are_an_error(tmp_path):
    file = write_safetensors(tmp_path / "model.safetensors", ["a.weight", "a.weight.quant_state.bitsandbytes__nf4"])
    (error,) = check(models.check, pretrained_model_name_or_path=str(file)).errors
    assert "weights in bitsandbytes' 4 bits (nf4), which cannot be read" in error


@pytest.mark.parametrize(
    ("script", "args", "expected"),
    [
        ("flux_train_network.py", {}, ["clip_l", "t5xxl", "ae"]),
        ("flux_train_control_net.py", {"ae": "nope"}, ["ae", "clip_l", "t5xxl"]),
        ("flux_train_network.py", {"model_type": "chroma"}, ["t5xxl", "ae"]),
        ("sd3_train.py", {}, ["clip_l", "clip_g", "t5xxl"]),
        ("lumina_train.py", {}, ["gemma2", "ae"]),
        ("anima_train_control_net_lllite.py", {}, ["qwen3", "vae"]),
        ("hunyuan_image_train_network.py", {}, ["text_encoder", "byt5", "vae"]),
        ("sdxl_train.py", {}, []),
        ("train_leco.py", {}, []),
    ],
)
def test_every_file_that_a_script_needs_is_required(tmp_path, script, args, expected):
    (tmp_path / "model_index.json").touch()
    (tmp_path / "transformer").mkdir()
    errors = check(models.check, script, pretrained_model_name_or_path=str(tmp_path), **args).errors
    errors = [error for error in errors if "is a folder" not in error]
    assert [error.removeprefix("--").split()[0] for error in errors] == expected


def test_files_that_only_other_families_read_are_not_checked(tmp_path):
    chroma = {"model_type": "chroma", "clip_l": str(tmp_path / "none.safetensors"), "vae": "nope"}
    errors = check(models.check, "flux_train_network.py", pretrained_model_name_or_path=str(tmp_path), **chroma).errors
    assert [error for error in errors if "clip_l" in error or "vae" in error] == []


def test_a_missing_part_of_a_split_model_is_an_error(tmp_path):
    file = write_safetensors(tmp_path / "model-00001-of-00002.safetensors", ["double_blocks.0.img_attn.x"])
    run = {"script": "flux_train.py", "pretrained_model_name_or_path": str(file)}
    assert "needs model-00002-of-00002.safetensors" in check(models.check, **run).errors[0]
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", ["double_blocks.1.img_attn.x"])
    assert not any("00002" in error for error in check(models.check, **run).errors)


@pytest.mark.parametrize(
    ("script", "blocks", "most"),
    [
        ("flux_train_network.py", {"double_blocks": 19, "single_blocks": 38}, 35),
        ("sd3_train_network.py", {"model.diffusion_model.joint_blocks": 24}, 22),
        ("anima_train_network.py", {"net.blocks": 40, "net.llm_adapter.blocks": 6}, 38),
        ("lumina_train.py", {"layers": 26}, None),
    ],
)
def test_more_swapped_blocks_than_the_model_has_are_an_error(tmp_path, script, blocks, most):
    marks = {"flux": "double_blocks.0.img_attn.x", "sd3": "joint_blocks.0.x", "anim": "llm_adapter.x", "lumi": "cap_embedder.x"}
    names = [f"{name}.{index}.x" for name, count in blocks.items() for index in range(count)]
    file = write_safetensors(tmp_path / "model.safetensors", [*names, next(marks[key] for key in marks if key in script)])

    def errors(swapped):
        findings = check(models.check, script, pretrained_model_name_or_path=str(file), blocks_to_swap=swapped)
        return [error for error in findings.errors if "blocks_to_swap" in error]

    assert errors(500) == ([f"--blocks_to_swap 500 is too large for model.safetensors; use at most {most}"] if most else [])
    assert not errors(most)


def test_missing_model_file_is_an_error_but_a_repository_is_not(tmp_path):
    assert check(models.check, pretrained_model_name_or_path=str(tmp_path / "no.safetensors")).errors
    assert not check(models.check, pretrained_model_name_or_path="stabilityai/sdxl").errors
    assert check(models.check, pretrained_model_name_or_path=None).errors


# --- the training set ------------------------------------------------------------------------------------------------


def write_images(folder, *sizes):
    folder.mkdir(parents=True)
    for index, size in enumerate(sizes or [(64, 64)] * 2):
        image.new("RGB", size).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text("a cat")
    return folder


ARGS = {"resolution": "64", "caption_extension": ".txt", "max_train_steps": 20, "train_batch_size": 2}


def test_steps_are_counted(tmp_path):
    write_images(tmp_path / "5_cat")
    findings = check(data.check, train_data_dir=str(tmp_path), **ARGS)
    assert not findings.errors
    assert not findings.warnings
    assert findings.notes == ["2 images, 10 with repeats, about 5 steps per epoch; 20 steps in total, 4 epochs"]


@pytest.mark.parametrize(
    ("args", "is_warned"),
    [
        ({"initial_epoch": 5}, True),
        ({"initial_epoch": 4}, False),
        ({"max_train_epochs": 2, "initial_step": 10}, True),
        ({"max_train_epochs": 2, "initial_step": 9}, False),
    ],
)
def test_a_start_after_the_end_is_a_warning_where_the_steps_of_an_epoch_are_estimated(tmp_path, args, is_warned):
    write_images(tmp_path / "5_cat")
    warnings = check(data.check, train_data_dir=str(tmp_path), **ARGS, **args).warnings
    assert any("about the end of the run" in line for line in warnings) == is_warned


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"initial_step": 12}, "begins at step 12, but numbers it 2"),
        ({"initial_step": 5}, "up to 5 steps more than the rest are trained"),
        ({"initial_step": 4}, None),
        ({"initial_epoch": 2}, None),
    ],
    ids=str,
)
def test_a_first_step_after_the_first_epoch_is_a_warning_if_the_steps_before_it_are_skipped(tmp_path, given, message):
    write_images(tmp_path / "5_cat")
    findings = check(data.check, train_data_dir=str(tmp_path), skip_until_initial_step=True, **given, **ARGS)
    assert [message in each for each in findings.warnings] == [True] * bool(message)
    assert not check(data.check, train_data_dir=str(tmp_path), skip_until_initial_step=False, **given, **ARGS).warnings


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("missing", "does not exist"),
        ("no_number", "no subfolder of images named N_name"),
        ("inside", "must contain folders of images"),
    ],
)
def test_data_folder_without_images_for_upstream_is_an_error(tmp_path, folder, expected):
    write_images(tmp_path / "no_number" / "cat")
    write_images(tmp_path / "inside")
    (error,) = check(data.check, train_data_dir=str(tmp_path / folder), **ARGS).errors
    assert expected in error


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp"])
def test_truncated_image_is_damaged(tmp_path, kind):
    complete, truncated = tmp_path / f"complete.{kind}", tmp_path / f"truncated.{kind}"
    image.effect_noise((200, 200), 50).convert("RGB").save(complete)
    truncated.write_bytes(complete.read_bytes()[:-2000])
    assert data.check_image(complete) == data.CheckedImage(None, (200, 200))
    assert data.check_image(truncated).problem.startswith("is damaged")


def test_checked_images_of_a_cached_dataset_are_not_opened_again(tmp_path, monkeypatch):
    folder = write_images(tmp_path / "2_cat", (64, 64), (128, 64))
    run = {
        "train_data_dir": str(tmp_path),
        "resolution": "64",
        "caption_extension": ".txt",
        "max_train_steps": 1,
        "enable_bucket": True,
        "min_bucket_reso": 64,
    }
    opened = []
    checked = data.check_image
    monkeypatch.setattr(data, "check_image", lambda file: opened.append(file.name) or checked(file))
    for options_, count in (({}, 2), ({"cache_latents_to_disk": True}, 2), ({"cache_latents_to_disk": True}, 0)):
        opened.clear()
        findings = check(data.check, **run, **options_)
        assert not findings.errors
        assert len(opened) == count
        assert findings.notes[-1].startswith("2 images, 4 with repeats")
    image = next(file for file in folder.iterdir() if file.suffix in data.IMAGE_SUFFIXES)
    image.write_bytes(b"damaged")
    image.with_suffix(".txt").write_text("")
    errors = check(data.check, **run, cache_latents_to_disk=True).errors
    assert [image.name in error or "empty captions" in error for error in errors] == [True, True]


def test_images_whose_suffix_has_a_mixed_case_are_a_warning_where_sd_scripts_leaves_them_out(tmp_path):
    folder = tmp_path / "5_cat"
    write_images(folder)
    for file in sorted(folder.glob("*.png")):
        for name in ("mixed.Png", "upper.PNG"):
            shutil.copy(file, folder / f"{file.stem}_{name}")
    findings = check(data.check, train_data_dir=str(tmp_path), **ARGS)
    assert not findings.errors
    expected = "2 images are not trained, because sd-scripts reads .png or .PNG, not .Png: 0_mixed.Png, 1"
    assert [expected in line for line in findings.warnings if "not trained" in line] == [True] * (os.name != "nt")
    assert findings.notes[-1].startswith("6 images" if os.name == "nt" else "4 images")
    (tmp_path / "meta.json").write_text("{}")
    findings = check(data.check, train_data_dir=str(folder), in_json=str(tmp_path / "meta.json"), **ARGS)
    assert findings.notes[-1].startswith("6 images")


def test_images_are_those_that_sd_scripts_takes_for_images(tmp_path):
    """It chooses by the name, and glob leaves out hidden files, such as those that macOS adds on other file systems."""
    folder = write_images(tmp_path / "1_cat")
    (folder / "._0.png").write_bytes(b"metadata")
    args = {**ARGS, "train_data_dir": str(tmp_path)}
    assert not check(data.check, **args).errors
    (folder / "folder.png").mkdir()
    (error,) = check(data.check, **args).errors
    assert "folder.png is a folder" in error


@pytest.mark.linux("links need rights on Windows")
def test_links_that_lead_to_no_image_are_errors(tmp_path):
    folder = write_images(tmp_path / "1_cat")
    (folder / "lost.png").symlink_to(folder / "nothing.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    loop, lost = check(data.check, **ARGS, train_data_dir=str(tmp_path)).errors
    assert "loop.png is a folder or a link" in loop
    assert "lost.png is a folder or a link" in lost


def test_an_image_that_pillow_refuses_is_an_error(tmp_path, monkeypatch):
    folder = write_images(tmp_path / "1_cat", (64, 64))
    monkeypatch.setattr(image, "MAX_IMAGE_PIXELS", 2000)
    (error,) = check(data.check, **ARGS, train_data_dir=str(tmp_path)).errors
    assert error == f"{folder / '0.png'} has more than 4,000 pixels, which Pillow refuses to read; shrink it"


def write_colours(folder):
    """Write images with transparent areas, with an opaque alpha channel, in Display P3, and in sRGB."""
    folder.mkdir()
    clear = image.new("RGBA", (64, 64), "red")
    clear.paste((0, 0, 0, 0), (0, 0, 32, 64))
    clear.save(folder / "clear.png")
    image.new("RGBA", (64, 64), "red").save(folder / "opaque.png")
    management = pytest.importorskip("PIL.ImageCms")
    srgb = management.ImageCmsProfile(management.createProfile("sRGB")).tobytes()
    p3 = srgb.replace("sRGB built-in".encode("utf-16-be"), "Display P3   ".encode("utf-16-be"))
    assert p3 != srgb
    for name, profile in (("p3.jpg", p3), ("srgb.jpg", srgb), ("p3.png", p3), ("srgb.webp", srgb)):
        image.new("RGB", (64, 64), "red").save(folder / name, icc_profile=profile)
    for file in [*folder.iterdir()]:
        file.with_suffix(".txt").write_text("a cat")


@pytest.mark.parametrize("options_", [{}, {"cache_latents_to_disk": True}])
def test_transparent_images_and_other_colour_spaces_are_warnings(tmp_path, options_):
    write_colours(tmp_path / "1_cat")
    args = {**ARGS, "train_data_dir": str(tmp_path), **options_}
    for _ in range(2):  # the second time from the index, if the run caches latents
        alpha, profiles = [line for line in check(data.check, **args).warnings if "same name" not in line]
        assert alpha.startswith("2 of 6 images in")
        assert "--alpha_mask" in alpha
        assert "2 of 6 images" in profiles
        assert "(2 Display P3)" in profiles
    (tmp_path / "1_cat" / "clear.png").unlink()
    assert not any("alpha" in line for line in check(data.check, **args).warnings), "opaque alpha channels change nothing"


@pytest.mark.parametrize("options_", [{}, {"cache_latents_to_disk": True}])
def test_turned_and_deep_images_are_warnings(tmp_path, options_):
    folder = tmp_path / "1_cat"
    folder.mkdir()
    for name, orientation in (("upright.jpg", 1), ("side.jpg", 6), ("side.png", 8), ("mirrored.webp", 2)):
        exif = image.Exif()
        exif[0x0112] = orientation
        image.new("RGB", (64, 64), "red").save(folder / name, exif=exif)
    image.new("RGB", (64, 64), "red").save(folder / "damaged.jpg", exif=b"Exif\0\0MM\0*\xff")
    image.new("I;16", (64, 64), 9).save(folder / "deep.png")
    for file in [*folder.iterdir()]:
        file.with_suffix(".txt").write_text("a cat")
    args = {**ARGS, "train_data_dir": str(tmp_path), **options_}
    for _ in range(2):  # the second time from the index, if the run caches latents
        turned, deep = [line for line in check(data.check, **args).warnings if "same name" not in line]
        assert turned.startswith("3 of 6 images in")
        assert "(mirrored.webp)" in turned
        assert deep.startswith("1 of 6 images in")
        assert "(deep.png)" in deep


def test_masks_use_transparent_images(tmp_path):
    write_colours(tmp_path / "1_cat")
    args = {**ARGS, "train_data_dir": str(tmp_path), "alpha_mask": True}
    assert not any("alpha" in line for line in check(data.check, **args).warnings)


@pytest.mark.parametrize(
    ("script", "caption", "args", "expected"),
    [
        (
            "sdxl_train.py",
            "a cat, " * 26,
            {},
            "75 tokens, and sd-scripts leaves out the rest; use --max_token_length 150",
        ),
        ("sdxl_train.py", "a cat, " * 25, {}, None),
        ("sdxl_train.py", "a cat, " * 26, {"max_token_length": 150}, None),
        ("sdxl_train.py", "a cat, " * 80, {"max_token_length": 225}, "shorten them"),
        ("sdxl_train.py", "a cat\n" + "a dog, " * 99, {}, None),
        ("flux_train.py", "a cat " * 200, {}, None),
        ("flux_train.py", "a cat " * 200, {"t5xxl_max_token_length": 256}, "use a larger --t5xxl_max_token_length"),
        ("sd3_train.py", "a cat " * 200, {}, "more than 256 tokens"),
        ("hunyuan_image_train_network.py", "a cat " * 200, {}, None),
    ],
)
def test_captions_that_are_cut_are_a_warning(tmp_path, script, caption, args, expected):
    folder = write_images(tmp_path / "1_cat")
    (folder / "0.txt").write_text(caption)
    for caching in ({}, {"cache_latents_to_disk": True}, {"cache_latents_to_disk": True}):
        warnings = check(data.check, script, train_data_dir=str(tmp_path), **ARGS, **args, **caching).warnings
        assert [expected in line and "at least 1 of 2 captions" in line for line in warnings] == [True] * (expected is not None)


def test_tokens_of_captions_are_counted_from_below():
    """CLIP's tokenizer makes these numbers of tokens, or more."""
    assert captions.count_tokens("it's a cat's 12 paws, (really:1.2)!") == (16, 6)
    assert set(captions.LIMITS) <= set(families.BY_NAME)


def test_empty_and_invalid_images_are_problems(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "b.jpg").write_text("hello")
    assert data.check_image(tmp_path / "a.png")[0] == "is empty (0 bytes)"
    assert "not a readable image" in data.check_image(tmp_path / "b.jpg")[0]


def test_missing_captions_are_counted_and_the_other_extension_is_suggested(tmp_path):
    write_images(tmp_path / "1_cat", *[(64, 64)] * 3)
    (warning,) = check(data.check, train_data_dir=str(tmp_path), **{**ARGS, "caption_extension": ".caption"}).warnings
    assert "3 of 3 images" in warning
    assert "caption 'cat'" in warning
    assert "--caption_extension .txt" in warning


@pytest.mark.parametrize("option", ["caption_extension", "caption_extention"])
@pytest.mark.parametrize("in_config", [False, True])
def test_a_caption_extension_may_lack_its_dot(tmp_path, option, in_config):
    folder = write_images(tmp_path / "data" / "1_cat")
    (tmp_path / "data.toml").write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder}'\n")
    where = {"dataset_config": str(tmp_path / "data.toml")} if in_config else {"train_data_dir": str(tmp_path / "data")}
    findings = check(data.check, **where, **{**ARGS, "caption_extension": ".caption", option: "txt"})
    assert not [*findings.errors, *findings.warnings]


def test_the_captions_of_other_images_than_the_first_are_suggested_as_an_option_of_the_config(tmp_path):
    folder = write_images(tmp_path / "data", *[(64, 64)] * 3)
    (folder / "0.txt").unlink()
    (tmp_path / "data.toml").write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder}'\n")
    (error,) = check(data.check, dataset_config=str(tmp_path / "data.toml"), max_train_steps=1).errors
    assert error.startswith("3 of 3 images")
    assert error.endswith('for the .txt files use caption_extension = ".txt"')


def test_captions_whose_first_line_is_blank_are_a_warning(tmp_path):
    write_images(tmp_path / "1_cat", *[(64, 64)] * 3)
    for index, text in enumerate(("\r\na cat\r\n", " \n", "a cat\n\n")):
        (tmp_path / "1_cat" / f"{index}.txt").write_bytes(text.encode())
    for caching in ({}, {"cache_latents_to_disk": True}):  # with caches, sound captions are remembered
        (warning,) = check(data.check, train_data_dir=str(tmp_path), **ARGS, **caching).warnings
        assert "2 captions train as empty ones" in warning
        assert warning.endswith("blank: 0.txt, 1.txt")
    (warning,) = check(data.check, train_data_dir=str(tmp_path), **ARGS, enable_wildcard=True).warnings
    assert warning.endswith("blank: 1.txt")


def test_dataset_config_is_read(tmp_path):
    write_images(tmp_path / "cats")
    config = tmp_path / "data.toml"
    config.write_text(
        f'[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 64\n'
        f"[[datasets.subsets]]\nimage_dir = {str(tmp_path / 'cats')!r}\nnum_repeats = 3\n"
        f"[[datasets.subsets]]\nimage_dir = {str(tmp_path / 'dogs')!r}\n"
    )
    (error,) = check(data.check, dataset_config=str(config), max_train_steps=3).errors
    assert "dogs does not exist" in error


def test_a_dataset_config_without_resolution_or_metadata_is_an_error(tmp_path):
    write_images(tmp_path / "cats")
    config = tmp_path / "data.toml"
    subset = f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = {str(tmp_path / 'cats')!r}\ncaption_extension = '.txt'\n"
    config.write_text(subset)
    (error,) = check(data.check, dataset_config=str(config), max_train_steps=3).errors
    assert error.endswith("data.toml: no resolution; add resolution = 1024 to each [[datasets]]")
    assert not check(data.check, dataset_config=str(config), max_train_steps=3, resolution="64").errors
    config.write_text(f"{subset}metadata_file = 'missing.json'\n")
    (error,) = check(data.check, dataset_config=str(config), max_train_steps=3).errors
    assert error.endswith("the metadata_file missing.json does not exist")


@pytest.mark.parametrize(
    ("script", "args", "more", "is_warned"),
    [
        ("sdxl_train_network.py", {"validation_split": 0.5}, "", True),
        ("sdxl_train_network.py", {"validation_split": 0.5, "seed": 1}, "", False),
        ("sdxl_train_network.py", {"validation_split": 0.5, "validation_seed": 0}, "", False),
        ("sdxl_train_network.py", {"validation_split": 0.0}, "", False),
        ("sdxl_train_network.py", {}, "validation_split = 0.5", True),
        ("sdxl_train_network.py", {}, "validation_split = 0.5\nvalidation_seed = 1", False),
        ("sdxl_train.py", {"validation_split": 0.5}, "", False),
    ],
)
def test_validation_images_that_change_at_a_resume_are_a_warning(tmp_path, script, args, more, is_warned):
    write_images(tmp_path / "data", (64, 64), (64, 64))
    text = f"[[datasets]]\nresolution = 64\n{more}\n[[datasets.subsets]]\nimage_dir = '{tmp_path / 'data'}'\n"
    (tmp_path / "data.toml").write_text(text)
    given = {"validation_split": 0.0, "validation_seed": None, "seed": None, "max_train_steps": 1, **args}
    warnings = check(data.check, script, dataset_config=str(tmp_path / "data.toml"), **given).warnings
    assert any("add --validation_seed 1" in line for line in warnings) == is_warned


def test_parent_of_a_subset_folder_is_suggested(tmp_path):
    write_images(tmp_path / "2_sks")
    (error,) = check(data.check, train_data_dir=str(tmp_path / "2_sks"), **ARGS).errors
    assert error.endswith(f"use --train_data_dir {tmp_path}")


def test_regularisation_images_are_counted_as_often_as_training_images(tmp_path):
    write_images(tmp_path / "train" / "5_cat")
    write_images(tmp_path / "reg" / "1_cat", *[(64, 64)] * 3)
    args = {**ARGS, "train_data_dir": str(tmp_path / "train"), "reg_data_dir": str(tmp_path / "reg")}
    assert check(data.check, **args).notes == [
        "5 images, 10 with repeats, about 10 steps per epoch; 20 steps in total, 2 epochs"
    ]
    # The first round may draw more than needed.
    write_images(tmp_path / "more" / "20_cat", *[(64, 64)] * 3)
    args["reg_data_dir"] = str(tmp_path / "more")
    assert "about 15 steps per epoch" in check(data.check, **args).notes[0]


def test_steps_are_counted_per_bucket(tmp_path):
    write_images(tmp_path / "1_cat", *[(64, 64)] * 3, *[(64, 128)] * 3)
    args = {**ARGS, "train_data_dir": str(tmp_path), "resolution": "128"}
    no_buckets = {"enable_bucket": False, "cache_latents": True}
    assert "about 3 steps per epoch" in check(data.check, **args, **no_buckets).notes[0]
    assert "about 4 steps per epoch" in check(data.check, **args, enable_bucket=True, min_bucket_reso=64).notes[0]
    args["max_train_epochs"] = 2
    assert check(data.check, **args, enable_bucket=True, min_bucket_reso=64).steps == 8


@pytest.mark.parametrize(
    ("sizes", "args", "expected"),
    [
        ([(64, 64), (96, 64)], {}, "1 of 2 images in"),
        ([(64, 64), (32, 64)], {}, "(for example 32x64)"),
        ([(64, 64), (32, 64)], {"random_crop": True}, "(for example 32x64)"),
        ([(96, 64)], {"random_crop": True}, None),
        ([(96, 64)], {"cache_latents": True}, None),
        ([(96, 64)], {"face_crop_aug_range": "1.0,1.5"}, None),
        ([(96, 64)], {"enable_bucket": True, "min_bucket_reso": 64}, None),
        ([(64, 64)], {}, None),
    ],
)
def test_images_that_sd_scripts_does_not_scale_are_an_error(tmp_path, sizes, args, expected):
    write_images(tmp_path / "1_cat", *sizes)
    errors = check(data.check, train_data_dir=str(tmp_path), **ARGS, **args).errors
    assert (expected is None and not errors) or (len(errors) == 1 and expected in errors[0])


def test_bucket_limits_that_upstream_rejects_are_an_error(tmp_path):
    write_images(tmp_path / "1_cat", (64, 64))
    args = {**ARGS, "train_data_dir": str(tmp_path), "enable_bucket": True}
    (error,) = check(data.check, **args).errors
    assert error.endswith("use --min_bucket_reso 64")
    (error,) = check(data.check, **{**args, "resolution": "1536"}).errors
    assert error.endswith("use --max_bucket_reso 3072")


def test_images_of_which_no_pixel_is_left_are_an_error(tmp_path):
    write_images(tmp_path / "1_cat", (96, 64), (2000, 40))
    args = {**ARGS, "train_data_dir": str(tmp_path), "resolution": "512", "enable_bucket": True}
    assert not check(data.check, **args).errors
    (error,) = check(data.check, **args, bucket_no_upscale=True).errors
    assert "1 of 2 images in" in error
    assert "(of 2000x40 pixels)" in error
    assert not check(data.check, **args, bucket_no_upscale=True, bucket_reso_steps=8).errors


def test_images_limited_by_max_bucket_reso_are_counted(tmp_path):
    write_images(tmp_path / "1_cat", (832, 1216), (1024, 1024))
    args = {**ARGS, "train_data_dir": str(tmp_path), "resolution": "1024", "enable_bucket": True}
    (warning,) = check(data.check, **args).warnings
    assert "1 of 2 images" in warning
    assert warning.endswith("use --max_bucket_reso 2048")
    assert not check(data.check, **args, max_bucket_reso=2048).warnings
    assert not check(data.check, **args, bucket_no_upscale=True).warnings


def test_caches_that_cannot_be_written_are_an_error(tmp_path, denied):
    folder = write_images(tmp_path / "1_cat")
    args = {**ARGS, "train_data_dir": str(tmp_path), "settings": Settings(caching_workers=0)}
    assert not check(data.check, **args, cache_latents_to_disk=True).errors
    denied()
    assert not check(data.check, **args).errors
    (error,) = check(data.check, **args, cache_latents_to_disk=True).errors
    assert error.startswith(f"--cache_latents_to_disk: {folder} cannot be written to: Permission denied")
    with zipfile.ZipFile(folder / "0_0064x0064_sdxl.npz", "w"):
        assert check(data.check, **args, cache_latents_to_disk=True).errors
    shutil.copy(folder / "0_0064x0064_sdxl.npz", folder / "1_0064x0064_sdxl.npz")
    assert not check(data.check, **args, cache_latents_to_disk=True).errors, "nothing is left to write"


def test_damaged_caches_are_errors_when_the_run_reads_caches(tmp_path):
    folder = write_images(tmp_path / "1_cat")
    numpy = pytest.importorskip("numpy")
    numpy.savez(folder / "0_0064x0064_sdxl.npz", latents=numpy.zeros(4))
    complete = (folder / "0_0064x0064_sdxl.npz").read_bytes()
    args = {**ARGS, "train_data_dir": str(tmp_path), "settings": Settings(caching_workers=0)}
    assert not check(data.check, **args, cache_latents_to_disk=True).errors
    (folder / "0_te_outputs.npz").touch()
    (folder / "1.npz").write_bytes(complete[:-30])
    (folder / "1_0064x0064_sdxl.npz").write_text("garbage")
    (folder / "another.npz").write_text("of another image")
    (error,) = check(data.check, **args, cache_latents_to_disk=True).errors
    assert "0_te_outputs.npz, 1.npz, 1_0064x0064_sdxl.npz. Delete them" in error
    assert not check(data.check, **args, cache_latents=True).errors
    assert not check(data.check, **{**args, "settings": Settings()}, cache_latents_to_disk=True).errors


def test_json_dataset_config_is_read_and_invalid_ones_are_errors(tmp_path):
    write_images(tmp_path / "cats")
    document = {"general": {"caption_extension": ".txt"}, "datasets": [{"subsets": [{"image_dir": str(tmp_path / "cats")}]}]}
    config = tmp_path / "data.json"
    config.write_text(json.dumps(document))
    args = {**ARGS, "dataset_config": str(config)}
    assert not check(data.check, **args).errors
    config.write_text("\ufeff" + json.dumps(document), encoding="utf-8")
    (error,) = check(data.check, **args).errors
    assert "save it as UTF-8 without BOM" in error
    config.write_bytes(b"\xff\xfe\x00")
    assert check(data.check, **args).errors == [f"--dataset_config {config} is not UTF-8 text; save it as UTF-8"]
    args["dataset_config"] = str(config.rename(tmp_path / "data.yaml"))
    assert check(data.check, **args).errors[0].endswith("the file name must end in .toml or .json")


# --- output and options ----------------------------------------------------------------------------------------------


def test_earlier_output_is_a_warning_and_is_not_removed(tmp_path):
    names = ["cat-step00000010.safetensors.host-7-0.partial", "cat.safetensors"]
    for name in names:
        (tmp_path / name).touch()
    args = {"output_dir": str(tmp_path), "output_name": "cat", "pretrained_model_name_or_path": ""}
    findings = check(output.check, **args)
    (warning,) = findings.warnings
    assert warning.endswith("will be renamed to cat.previous.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def write_lora_state(folder, rank, parts=("unet",)):
    shapes = {"down": [rank, 8], "up": [8, rank]}
    rows = {f"lora_{part}_x.lora_{name}.weight": shape for part in parts for name, shape in shapes.items()}
    size = rank * 8 * 4
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": shape, "data_offsets": [at * size, (at + 1) * size]}
            for at, (name, shape) in enumerate(rows.items())
        }
    )
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(len(rows) * size))
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("data", bytes(100))
    return folder


def test_state_of_another_rank_is_an_error(tmp_path):
    state = write_lora_state(tmp_path / "cat-state", rank=8)
    args = {"pretrained_model_name_or_path": "a/b", "network_module": "networks.lora", "resume": str(state)}
    args |= {"network_train_unet_only": True}
    assert not check(models.check, **args, network_dim=8).errors
    (error,) = check(models.check, **args, network_dim=16).errors
    assert "has rank 8, but --network_dim is 16" in error
    assert not check(models.check, **args, network_dim=16, network_args=["conv_dim=8"]).errors


@pytest.mark.parametrize(
    ("parts", "option", "message"),
    [
        (("unet", "te1"), None, None),
        (("unet",), "network_train_unet_only", None),
        (("te",), "network_train_text_encoder_only", None),
        (("unet", "te1"), "network_train_unet_only", "a text encoder, which --network_train_unet_only does not train; remove"),
        (("unet",), None, "has no LoRA of a text encoder; add --network_train_unet_only"),
        (("unet", "te"), "network_train_text_encoder_only", "has a LoRA of the model, which"),
        (("te",), None, "has no LoRA of the model; add --network_train_text_encoder_only"),
        (("other",), None, None),
    ],
)
def test_state_with_modules_that_the_run_does_not_train_is_an_error(tmp_path, parts, option, message):
    state = write_lora_state(tmp_path / "cat-state", 8, parts)
    args = {"pretrained_model_name_or_path": "a/b", "network_module": "networks.lora", "resume": str(state), "network_dim": 8}
    errors = check(models.check, **args, **({option: True} if option else {})).errors
    assert [message in error for error in errors] == [True] * (message is not None)
    assert not check(models.check, **args, **({option: True} if option else {}), dim_from_weights=True).errors
    assert not check(models.check, "sdxl_train_leco.py", **args).errors


@pytest.mark.parametrize("option", ["vae", "network_weights"])
@pytest.mark.parametrize("value", ["", "None", r"folder\x", "folder"])
def test_a_file_that_has_no_name_or_is_no_repository_is_an_error(option, value):
    (error,) = check(models.check, pretrained_model_name_or_path="a/b", **{option: value}).errors
    assert error.startswith(f"--{option} {value or 'is empty'}")


def test_a_file_to_continue_of_another_rank_or_without_a_network_is_an_error(tmp_path):
    file = write_lora_state(tmp_path / "cat-state", rank=8) / "model.safetensors"
    args = {"pretrained_model_name_or_path": "a/b", "network_module": "networks.lora", "network_weights": str(file)}
    assert not check(models.check, **args, network_dim=8).errors
    assert not check(models.check, **args, network_dim=16, dim_from_weights=True).errors
    (error,) = check(models.check, **args, network_dim=None).errors
    assert "has rank 8, but --network_dim is 4; use --network_dim 8, or --dim_from_weights" in error
    assert not check(models.check, **args | {"network_weights": None, "base_weights": [str(file)]}, network_dim=16).errors
    checkpoint = str(write_safetensors(tmp_path / "sdxl.safetensors", ["conditioner.embedders.1.model.x"]))
    for option, value in (("network_weights", checkpoint), ("base_weights", [str(file), checkpoint])):
        (error,) = check(models.check, **args | {"network_weights": None, option: value}, network_dim=8).errors
        assert f"--{option} {checkpoint} is a checkpoint of SDXL, not a network such as a LoRA" in error


def test_state_of_another_script_is_an_error(tmp_path):
    state = write_lora_state(tmp_path / "cat-state", rank=8)
    run_record.write(state, run_record.describe("sdxl_train.py", Namespace()), step=3)
    (error,) = check(models.check, pretrained_model_name_or_path="a/b", resume=str(state)).errors
    assert "was saved by sdxl_train.py, not sdxl_train_network.py" in error


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_state_with_a_missing_file_is_an_error(tmp_path, name):
    state = write_lora_state(tmp_path / "cat-state", rank=8)
    args = {"pretrained_model_name_or_path": "a/b", "output_dir": str(tmp_path), "output_name": "cat"}
    for resume in (str(state), "auto"):
        assert not check(models.check, **args, resume=resume).errors
    (state / name).unlink()
    for resume in (str(state), "auto"):
        (error,) = check(models.check, **args, resume=resume).errors
        assert name in error


@pytest.mark.parametrize("allowed", [True, False])
def test_paths_that_are_too_long_for_windows_are_an_error(tmp_path, monkeypatch, allowed):
    monkeypatch.setattr(output, "_allows_long_paths", lambda: allowed)
    assert not check(output.check, output_dir=str(tmp_path / "short"), output_name="cat").errors
    folder = tmp_path / ("a long name " * 10).strip()
    errors = check(output.check, output_dir=str(folder), output_name="cat").errors
    assert [error for error in errors if "is too long: a run writes paths of up to" in error] == errors
    assert folder.exists() == allowed != bool(errors)


def test_output_folder_that_cannot_be_created_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    (error,) = check(output.check, output_dir=str(tmp_path / "file" / "out")).errors
    assert "cannot be written to" in error
    assert check(output.check, output_dir=None).errors


def test_output_folder_that_denies_files_is_an_error(tmp_path, denied):
    denied()  # with tempfile, Windows would try other names for hours
    (error,) = check(output.check, output_dir=str(tmp_path)).errors
    assert error == f"--output_dir {tmp_path} cannot be written to: Permission denied"


def test_output_folder_with_a_space_at_its_end_works_or_is_an_error(tmp_path):
    folder = tmp_path / "out "
    errors = check(output.check, output_dir=str(folder)).errors
    assert [error for error in errors if error.endswith("; 'out ' ends with a space")] == errors
    if not errors:
        (folder / "model").touch()


def test_an_empty_output_name_is_an_error(tmp_path):
    (error,) = check(output.check, output_dir=str(tmp_path), output_name="").errors
    assert error.startswith("--output_name is empty")


@pytest.mark.parametrize("name", ["nul", "CON.v2", "com1"])
def test_names_of_devices_are_errors_on_windows(tmp_path, monkeypatch, name):
    monkeypatch.setattr(output, "os", SimpleNamespace(name="nt"))
    assert "the name of a device" in output.name_problem(tmp_path, name)
    assert output.name_problem(tmp_path, f"a{name}") is None
    monkeypatch.setattr(output, "os", SimpleNamespace(name="posix"))
    assert output.name_problem(tmp_path, name) is None


@pytest.mark.parametrize(
    ("script", "args", "expected"),
    [
        ("sdxl_train.py", {"fused_backward_pass": True, "optimizer_type": "AdamW"}, "Adafactor only"),
        (
            "sdxl_train.py",
            {"fused_backward_pass": True, "optimizer_type": "adafactor", "gradient_accumulation_steps": 2},
            "--gradient_accumulation_steps 2",
        ),
        ("sdxl_train.py", {"cache_text_encoder_outputs": True, "shuffle_caption": True}, "--shuffle_caption"),
        ("sdxl_train.py", {"cache_text_encoder_outputs": True, "train_text_encoder": True}, "--train_text_encoder"),
        ("sdxl_train.py", {"cache_latents": True, "random_crop": True}, "--random_crop"),
        ("sdxl_train.py", {"full_bf16": True, "mixed_precision": "no"}, "--mixed_precision bf16"),
        ("sdxl_train.py", {"lr_scheduler": "constant", "lr_warmup_steps": 10}, "constant_with_warmup"),
        (
            "sdxl_train.py",
            {"lr_scheduler": "cosine", "lr_warmup_steps": 10, "optimizer_type": "Adafactor"},
            "--lr_warmup_steps is an error with Adafactor's relative steps",
        ),
        (
            "sdxl_train.py",
            {"lr_scheduler": "adafactor", "optimizer_type": "Adafactor", "optimizer_args": ["relative_step=False"]},
            "ends with an IndexError",
        ),
        ("flux_train.py", {"loss_type": "huber"}, "add --huber_schedule constant"),
        ("sdxl_train.py", {"lr_scheduler": "cosin"}, "Did you mean cosine?"),
        ("sdxl_train.py", {"optimizer_args": ["weight_decay"]}, "name=value"),
        ("sdxl_train.py", {"v2": True, "pretrained_model_name_or_path": "x"}, "--v2"),
        (
            "flux_train.py",
            {"blockwise_fused_optimizers": True, "blocks_to_swap": 5, "cpu_offload_checkpointing": True},
            "--cpu_offload_checkpointing",
        ),
        ("flux_train.py", {"blocks_to_swap": 5}, "add --fused_backward_pass"),
        ("anima_train.py", {"blocks_to_swap": 5, "fused_backward_pass": False}, "finds weights in host memory"),
        ("sdxl_train.py", {"enable_bucket": True, "bucket_reso_steps": 16}, "multiple of 32"),
        ("fine_tune.py", {"enable_bucket": True, "bucket_reso_steps": 32}, "multiple of 64"),
        ("flux_train.py", {"enable_bucket": True, "bucket_reso_steps": 8}, "multiple of 16"),
        ("sd3_train.py", {"enable_bucket": True, "bucket_reso_steps": 4}, "multiple of 8"),
        ("train_db.py", {"stop_text_encoder_training": 0, "max_train_steps": 10}, "TypeError at that step"),
        ("train_db.py", {"stop_text_encoder_training": 20, "max_train_epochs": 2}, "TypeError at that step"),
        ("sdxl_train_control_net_lllite_old.py", {}, "use sdxl_train_control_net_lllite.py"),
    ],
)
def test_options_that_contradict_are_an_error(script, args, expected):
    (error,) = check(options.check, script, **args).errors
    assert expected in error


@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("flux_train.py", {"blocks_to_swap": 5, "blockwise_fused_optimizers": True}),
        ("flux_train.py", {"blocks_to_swap": 0}),
        ("flux_train.py", {"loss_type": "huber", "huber_schedule": "constant"}),
        ("sdxl_train.py", {"loss_type": "huber"}),
        ("sdxl_train.py", {"lr_scheduler": "adafactor", "optimizer_type": "Adafactor"}),
        (
            "sdxl_train.py",
            {
                "lr_scheduler": "cosine",
                "lr_warmup_steps": 10,
                "optimizer_type": "Adafactor",
                "optimizer_args": ["relative_step=False"],
            },
        ),
        ("flux_train_control_net.py", {"blocks_to_swap": 5}),
        ("lumina_train.py", {"blocks_to_swap": 5}),
        ("train_db.py", {"stop_text_encoder_training": -1, "max_train_steps": 10}),
        ("train_db.py", {"stop_text_encoder_training": 10, "max_train_steps": 10}),
    ],
)
def test_options_that_only_look_like_a_contradiction_are_no_error(script, args):
    assert check(options.check, script, **args).errors == []


@pytest.mark.parametrize(
    ("script", "args", "is_error"),
    [
        ("sdxl_train_network.py", {}, True),
        ("sdxl_train_network.py", {"network_train_unet_only": True}, False),
        ("anima_train_network.py", {}, True),
        ("hunyuan_image_train_network.py", {}, True),
        ("flux_train_network.py", {"model_type": "chroma"}, True),
        ("flux_train_network.py", {}, False),
        ("sd3_train_network.py", {}, False),
        ("lumina_train_network.py", {}, False),
    ],
)
def test_cached_outputs_need_frozen_text_encoders_unless_one_of_them_still_runs(script, args, is_error):
    errors = check(options.check, script, cache_text_encoder_outputs=True, **args).errors
    assert any("--cache_text_encoder_outputs needs --network_train_unet_only" in error for error in errors) == is_error


@pytest.mark.parametrize(
    ("script", "option", "warned"),
    [("train_db.py", "full_bf16", True), ("lumina_train.py", "blocks_to_swap", True), ("sdxl_train.py", "full_bf16", False)],
)
def test_option_that_the_script_does_not_read_is_a_warning(script, option, warned):
    warnings = check(options.check, script, **{option: True, "mixed_precision": "bf16"}).warnings
    assert [f"{script} does not read --{option}" in line for line in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            {"gradient_accumulation_steps": 0},
            "--gradient_accumulation_steps 0: sd-scripts divides by it; use 1 or more",
        ),
        ({"train_batch_size": 0}, "--train_batch_size 0"),
        ({"network_dim": -4, "network_module": "lycoris.kohya"}, "--network_dim -4"),
        ({"network_dim": 0, "network_module": "networks.lora"}, "--network_dim 0"),
        ({"network_dim": 1, "network_module": "networks.oft_v2"}, "use 2 or more, usually 32"),
        ({"learning_rate": -1.0}, "--learning_rate -1: optimizers reject a negative learning rate; use 0 or more"),
        ({"text_encoder_lr": [1e-5, -1e-5]}, "--text_encoder_lr -1e-05"),
        (
            {"save_every_n_steps": 0},
            "--save_every_n_steps 0: sd-scripts divides by it; use 1 or more, or remove it",
        ),
        ({"save_every_n_epochs": 0}, "--save_every_n_epochs 0"),
        ({"validate_every_n_steps": 0}, "--validate_every_n_steps 0"),
        ({"validate_every_n_epochs": 0}, "--validate_every_n_epochs 0"),
        ({"save_last_n_epochs": 0}, "--save_last_n_epochs 0: the file that was just saved would be removed"),
        ({"max_data_loader_n_workers": -1}, "--max_data_loader_n_workers -1"),
        ({"initial_epoch": 0}, "--initial_epoch 0: epochs are counted from 1; use 1 or more, or remove it"),
        ({"initial_step": -1}, "--initial_step -1"),
        (
            {"initial_step": 1600, "max_train_steps": 1600, "initial_epoch": 2},
            "--initial_step 1600 leaves nothing to train of --max_train_steps 1600; change one of them",
        ),
        ({"initial_epoch": 3, "max_train_epochs": 2, "max_train_steps": 9}, "--initial_epoch 3 leaves nothing to train"),
        ({"max_train_epochs": 0}, "--max_train_epochs 0: nothing would be trained"),
        ({"seed": -1}, "--seed -1: NumPy requires an unsigned 32-bit seed; use a number from 0 to 4294967295"),
        ({"min_snr_gamma": -5.0}, "--min_snr_gamma -5: the loss would be maximized"),
        ({"max_grad_norm": -1.0}, "--max_grad_norm -1"),
        ({"network_dropout": 1.5}, "--network_dropout 1.5: it is a probability; use a number from 0 to 1"),
        ({"caption_dropout_rate": 10}, "--caption_dropout_rate 10"),
        ({"lr_warmup_steps": -10, "lr_scheduler": "cosine"}, "--lr_warmup_steps -10"),
        (
            {"persistent_data_loader_workers": True, "max_data_loader_n_workers": 0},
            "use --max_data_loader_n_workers 1 or more",
        ),
    ],
)
def test_number_out_of_range_is_an_error_with_the_range(args, expected):
    (error,) = check(options.check, "sdxl_train.py", **args).errors
    assert error.startswith(expected) or expected in error


def test_clip_skip_is_checked_for_sd15_only():
    assert check(options.check, "train_db.py", clip_skip=0).errors
    (error,) = check(options.check, "fine_tune.py", clip_skip=13).errors
    assert error == "--clip_skip 13: the text encoder has 12 layers; use a number from 1 to 12, or remove it"
    assert not check(options.check, "fine_tune.py", clip_skip=12).errors
    assert not check(options.check, "fine_tune.py", clip_skip=23, v2=True).errors
    assert not check(options.check, "sdxl_train.py", clip_skip=13).errors
    assert not check(options.check, "sdxl_train.py", clip_skip=0).errors


@pytest.mark.parametrize(
    ("script", "args", "fails"),
    [
        ("flux_train.py", {"mixed_precision": "fp16"}, True),
        ("lumina_train.py", {"mixed_precision": "fp16"}, True),
        ("flux_train.py", {"mixed_precision": "fp16", "full_fp16": True}, False),
        ("flux_train.py", {"mixed_precision": "bf16"}, False),
        ("sdxl_train.py", {"mixed_precision": "fp16"}, False),
    ],
)
def test_fp16_weights_without_full_fp16_are_an_error(script, args, fails):
    errors = check(options.check, script, **args).errors
    assert any("use --mixed_precision bf16, or add --full_fp16" in error for error in errors) == fails


@pytest.mark.parametrize(
    "args",
    [
        {"learning_rate": 0.0, "unet_lr": 1e-4},
        {"network_dim": 0, "network_module": "networks.lora", "network_args": ["conv_dim=4"]},
        {"network_dim": 0, "network_module": "lycoris.kohya"},
        {"network_dim": 1, "network_module": "networks.boft"},
        {"network_dim": 1, "network_module": "networks.oft_v2", "network_args": ["block_size=16"]},
        {"network_dim": -1, "dim_from_weights": True},
        {"network_alpha": 0},
        {"initial_step": 9, "max_train_steps": 8, "max_train_epochs": 2},
        {"initial_step": 0, "initial_epoch": 9, "max_train_steps": 8, "max_train_epochs": 2},
        {"sample_every_n_steps": 0, "min_snr_gamma": 0, "max_grad_norm": 0, "scale_weight_norms": 0, "save_last_n_steps": 0},
        {
            "caption_dropout_rate": 0,
            "caption_dropout_every_n_epochs": 0,
            "keep_tokens": 0,
            "network_dropout": 0,
            "noise_offset": -1,
        },
        {"max_data_loader_n_workers": 0, "persistent_data_loader_workers": False, "lr_warmup_steps": 0, "seed": 0},
    ],
)
def test_numbers_with_a_special_meaning_are_accepted(args):
    assert not check(options.check, "sdxl_train.py", **args).errors


def test_persistent_workers_are_accepted_with_deepspeed_which_has_one():
    args = {"max_data_loader_n_workers": 0, "persistent_data_loader_workers": True}
    assert check(options.check, "sdxl_train.py", **args).errors
    errors = check(options.check, "sdxl_train.py", **args, deepspeed=True).errors
    assert all("pip install deepspeed" in error for error in errors)


def test_number_out_of_range_in_a_dataset_config_is_an_error(tmp_path):
    config = tmp_path / "data.toml"
    config.write_text('[[datasets]]\nbatch_size = 0\n[[datasets.subsets]]\nimage_dir = "cats"\ncaption_dropout_rate = 2\n')
    errors = check(options.check, "sdxl_train.py", dataset_config=str(config)).errors
    assert [error.partition(": ")[2].partition(":")[0] for error in errors] == ["train_batch_size 0", "caption_dropout_rate 2"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"optimizer_type": "Prodigy", "learning_rate": 1e-4}, "Use --learning_rate 1"),
        ({"optimizer_type": "DAdaptAdam", "unet_lr": 1e-4}, "Use --learning_rate 1"),
        ({"optimizer_type": "AdamW", "learning_rate": 1.0}, "Use --learning_rate 1e-4"),
        ({"optimizer_type": "torch.optim.AdamW", "learning_rate": 1.0}, "Use --learning_rate 1e-4"),
        ({"learning_rate": 1.0}, "Use --learning_rate 1e-4"),
        ({"optimizer_type": "Prodigy", "learning_rate": 1.0}, None),
        ({"optimizer_type": "AdamW", "learning_rate": 1e-2}, None),
        ({"optimizer_type": "SGDNesterov", "learning_rate": 1.0}, None),
        ({"optimizer_type": "Adafactor", "learning_rate": 1.0}, None),
    ],
)
def test_unusual_learning_rate_for_the_optimizer_is_a_warning(args, expected):
    warnings = check(options.check, "sdxl_train.py", **args).warnings
    assert (expected is None and not warnings) or (len(warnings) == 1 and expected in warnings[0])


@pytest.mark.parametrize(
    ("args", "is_warned"),
    [
        ({"text_encoder_lr": 0.0}, True),
        ({"text_encoder_lr": [0.0, 0.0]}, True),
        ({"text_encoder_lr": [0.0, 1e-5]}, False),
        ({"text_encoder_lr": None}, False),
        ({"text_encoder_lr": []}, False),
        ({"text_encoder_lr": [0.0], "network_train_unet_only": True}, False),
        ({"text_encoder_lr": [0.0], "max_grad_norm": 0.0}, False),
    ],
)
def test_a_rate_of_0_that_does_not_freeze_the_text_encoders_is_a_warning(args, is_warned):
    warnings = check(options.check, "sdxl_train_network.py", network_module="networks.lora", **args).warnings
    assert ["--network_train_unet_only" in warning for warning in warnings] == [True] * is_warned


@pytest.mark.parametrize(
    ("script", "is_warned"),
    [("flux_train_network.py", True), ("lumina_train_network.py", False), ("hunyuan_image_train_network.py", False)],
)
def test_cached_text_encoder_outputs_have_no_gradients_but_where_clip_is_trained(script, is_warned):
    args = {"network_module": "networks.lora", "text_encoder_lr": [0.0], "cache_text_encoder_outputs": True}
    warnings = check(options.check, script, **args).warnings
    assert any("--text_encoder_lr 0" in warning for warning in warnings) is is_warned


@pytest.mark.parametrize(
    ("script", "args", "expected"),
    [
        ("sdxl_train_network.py", {"network_module": "lycoris.kohya"}, "pip install lycoris-lora"),
        ("sdxl_train.py", {"optimizer_type": "no_such_thing.Optimizer"}, "pip install no-such-thing"),
    ],
)
def test_missing_package_is_an_error_with_the_install_command(monkeypatch, script, args, expected):
    find = importlib.util.find_spec

    def absent(name, package=None):
        return None if name.partition(".")[0] in ("lycoris", "no_such_thing") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    (error,) = check(options.check, script, **args).errors
    assert expected in error


@pytest.mark.parametrize(
    ("name", "expected"),
    [("x" * 300, "too long"), ("ü" * 120, "too long"), ("no/cat", "is a path in a folder that does not exist")],
)
def test_invalid_output_name_is_an_error(tmp_path, name, expected):
    (error,) = check(output.check, output_dir=str(tmp_path / "new"), output_name=name).errors
    assert expected in error


def test_contradicting_options_of_one_subset_are_an_error(tmp_path):
    config = tmp_path / "data.toml"
    config.write_text(
        "[general]\nshuffle_caption = true\n[[datasets]]\n"
        '[[datasets.subsets]]\nimage_dir = "cats"\nshuffle_caption = false\n'
        '[[datasets.subsets]]\nimage_dir = "dogs"\ncolor_aug = true\n'
    )
    args = {"cache_text_encoder_outputs": True, "cache_latents": True, "shuffle_caption": True}
    errors = check(options.check, "sdxl_train.py", dataset_config=str(config), **args).errors
    assert [error.partition(": ")[0] for error in errors] == [f"{config}, dogs"] * 2
    assert "--shuffle_caption" in errors[0]
    assert "--color_aug" in errors[1]


def test_prompt_without_a_seed_is_an_error_for_hunyuan_image_only(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# of two\na cat --w 512 --d 7\na dog --w 512\n", encoding="utf-8")

    def problems(script, every=9):
        errors = check(options.check, script, sample_prompts=str(prompts), sample_every_n_steps=every).errors
        return [error for error in errors if "seed" in error]

    (error,) = problems("hunyuan_image_train_network.py")
    assert "a prompt without a seed (number 2); add --d 1" in error
    assert not problems("hunyuan_image_train_network.py", every=None)
    assert not problems("flux_train_network.py")
    prompts.write_text("a cat --d 7\n", encoding="utf-8")
    assert not problems("hunyuan_image_train_network.py")


@pytest.mark.parametrize("option", ["sample_every_n_steps", "sample_every_n_epochs", "sample_at_first"])
def test_samples_without_prompts_are_an_error(option):
    (error,) = check(options.check, "flux_train_network.py", network_module="x", **{option: 1}).errors[-1:]
    assert error == f"--{option} needs --sample_prompts FILE, with a prompt on each line"


@pytest.mark.parametrize(
    ("name", "text"), [("none.txt", None), ("p.toml", "width = 640\n"), ("p.json", "["), ("prompts", "a cat")]
)
def test_prompts_that_cannot_be_read_are_an_error(tmp_path, name, text):
    prompts = tmp_path / name
    if text is not None:
        prompts.write_text(text, encoding="utf-8")
    sampling = {"sample_prompts": str(prompts), "sample_every_n_epochs": 1}
    (error,) = check(options.check, "sdxl_train.py", **sampling).errors
    assert f"--sample_prompts {prompts}" in error
    assert not check(options.check, "sdxl_train.py", sample_prompts=str(prompts)).errors, "prompts alone are not sampled"
    caching = {"sample_prompts": str(prompts), "cache_text_encoder_outputs": True}
    assert check(options.check, "sdxl_train.py", **caching).errors == [error], "caching encodes them"


def test_valid_options_are_accepted():
    args = {"optimizer_type": "AdamW", "optimizer_args": ["weight_decay=0.1", "betas=(0.9,0.99)"], "lr_scheduler": "cosine"}
    pytest.importorskip("torch")
    assert not check(options.check, "sdxl_train.py", mixed_precision="bf16", full_bf16=True, lr_warmup_steps=5, **args).errors


@pytest.mark.parametrize(
    ("package", "args", "expected"),
    [
        ("torch", {"optimizer_type": "AdamW", "optimizer_args": ["weight_decy=0.1"]}, "Did you mean weight_decay?"),
        ("torch", {"optimizer_type": "AdamW", "optimizer_args": ["lr=0.1"]}, "--learning_rate sets it"),
        ("prodigyopt", {"optimizer_type": "prodigy", "optimizer_args": ["d_coeff=2"]}, "Did you mean d_coef?"),
        ("bitsandbytes", {"optimizer_type": "PagedLion8bit", "optimizer_args": ["wight_decay=2"]}, "weight_decay?"),
        ("transformers", {"optimizer_type": "Adafactor", "optimizer_args": ["relative=True"]}, "relative_step?"),
        ("transformers", {"lr_scheduler": "cosine", "lr_scheduler_args": ["cycles=2"]}, "num_cycles?"),
        ("diffusers", {"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ["steps_rule='1:2,1'"]}, "step_rules?"),
        ("torch", {"lr_scheduler_type": "StepLR", "lr_scheduler_args": ["step_sze=2"]}, "Did you mean step_size?"),
    ],
)
def test_arguments_of_optimizers_and_schedulers_are_checked(package, args, expected):
    pytest.importorskip(package)
    (error,) = check(options.check, "sdxl_train.py", **args).errors
    assert expected in error


def test_network_args_that_the_network_ignores_are_a_warning(tmp_path):
    (tmp_path / "networks").mkdir()
    (tmp_path / "networks" / "__init__.py").touch()
    (tmp_path / "networks" / "lora.py").write_text('def create_network(**kwargs):\n    dim = kwargs.get("conv_dim")\n')
    script = tmp_path / "sdxl_train_network.py"
    findings = preflight.Findings()
    args = Namespace(network_module="networks.lora", network_args=["conv_dim=4", "conf_dim=4"])
    options.check(script, args, findings)
    (warning,) = findings.warnings
    assert warning == "--network_args: networks.lora does not know conf_dim and will ignore it. Did you mean conv_dim?"


def test_a_decimal_comma_in_optimizer_args_is_an_error():
    pytest.importorskip("torch")
    args = {"optimizer_type": "AdamW", "optimizer_args": ["weight_decay=0,1", "betas=0.9,0.99"]}
    errors = [error for error in check(options.check, **args).errors if "optimizer_args" in error]
    assert errors == ["--optimizer_args: AdamW: weight_decay=0,1 is a pair of numbers; write weight_decay=0.1"]


@pytest.mark.parametrize("tracker", ["wandb", "all", "tensorboard"])
def test_a_tracker_that_cannot_be_made_is_an_error(tracker, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    errors = " ".join(check(options.check, log_with=tracker).errors)
    assert ("pip install wandb" in errors) == (tracker != "tensorboard")
    assert ("needs --logging_dir FOLDER" in errors) == (tracker != "wandb")
    assert "--logging_dir" not in " ".join(check(options.check, log_with=tracker, logging_dir=str(tmp_path)).errors)


def test_a_variable_that_is_misspelt_is_a_warning(monkeypatch):
    monkeypatch.setenv("KOHYA_EXT_PRESETS", "16gb")
    monkeypatch.setenv("KOHYA_EXT_CACHE", "cache")
    (warning,) = check(options.check).warnings
    assert warning.endswith("KOHYA_EXT_PRESETS. Did you mean KOHYA_EXT_PRESET?")


def test_a_number_that_is_none_is_an_error():
    errors = [
        *numbers.problems(Path("sdxl_train.py"), Namespace(noise_offset=math.nan, learning_rate=math.nan, network_alpha=1.0))
    ]
    assert len(errors) == 2
    assert "--noise_offset nan is not a number to train with; correct or remove it" in errors


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"lr_scheduler": "cosine_with_min_lr"}, "--lr_scheduler cosine_with_min_lr needs --lr_scheduler_min_lr_ratio 0.1"),
        ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_min_lr_ratio": 0.1}, None),
        ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_args": ["min_lr=1e-6"]}, None),
        ({"lr_scheduler": "piecewise_constant"}, "piecewise_constant needs --lr_scheduler_args"),
        ({"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ["step_rules='1:2,0.1'"]}, None),
        ({"optimizer_type": "prodigy", "learning_rate": 1.0, "text_encoder_lr": [0.5]}, "or 0, not 0.5, 1; give"),
        ({"optimizer_type": "prodigy", "learning_rate": 1.0, "text_encoder_lr": [0.0, 1.0]}, None),
        ({"optimizer_type": "DAdaptation", "learning_rate": 1.0, "unet_lr": 0.5, "text_encoder_lr": 0.5}, None),
        ({"optimizer_type": "AdamW", "learning_rate": 1.0, "text_encoder_lr": [0.5]}, None),
        ({"min_timestep": 900, "max_timestep": 100}, "each step would train timestep 100"),
        ({"min_timestep": 100, "max_timestep": 100}, None),
    ],
)
def test_schedules_rates_and_timesteps_that_end_a_run_are_errors(args, expected):
    errors = " ".join(check(options.check, network_module="networks.lora", **args).errors)
    messages = ("needs --lr", "needs the same", "is above")
    assert expected in errors if expected else not any(message in errors for message in messages)


def test_network_args_in_one_pair_of_quotes_are_an_error():
    args = {"network_module": "networks.lora", "network_args": ["conv_dim=4 conv_alpha=1"]}
    errors = check(options.check, **args).errors
    assert any(
        error.endswith("write conv_dim=4 conv_alpha=1 without quotes, or in a file ['conv_dim=4', 'conv_alpha=1']")
        for error in errors
    )


@pytest.mark.parametrize("name", ["", "None"])
def test_the_name_of_no_schedule_is_an_error(name):
    errors = check(options.check, lr_scheduler=name).errors
    assert any(error.startswith(f"unknown --lr_scheduler {name!r}; use one of linear") for error in errors)


@pytest.mark.parametrize(
    ("script", "module", "fails"),
    [
        ("train_network.py", "networks.loha", True),
        ("flux_train_network.py", "networks.lokr", True),
        ("sdxl_train_network.py", "networks.loha", False),
        ("anima_train_network.py", "networks.lokr", False),
        ("flux_train_network.py", "networks.lora_flux", False),
    ],
)
def test_networks_that_do_not_know_the_family_are_an_error(script, module, fails):
    errors = check(options.check, script, network_module=module).errors
    assert any("supports SDXL and Anima only; use lycoris.kohya" in error for error in errors) == fails


@pytest.mark.parametrize(
    ("script", "settings", "args", "expected"),
    [
        ("train_textual_inversion.py", {"ema": True}, {}, "--ema supports networks (LoRA)"),
        ("train_control_net.py", {"validation_split": 0.1}, {}, "--validation_split: upstream cannot split"),
        ("train_controlnet.py", {"validation_split": 0.1}, {}, "--validation_split: upstream cannot split"),
        ("train_textual_inversion.py", {"early_stopping": 3}, {}, "--early_stopping: this script has no loop"),
        (
            "sdxl_train.py",
            {"sample_multipliers": (0.0,)},
            {"sample_prompts": "a.txt"},
            "--sample_multipliers has no effect: sdxl",
        ),
        ("train_network.py", {"sample_multipliers": (0.0,)}, {}, "--sample_multipliers has no effect without --sample_prompts"),
        ("train_network.py", {"sample_multipliers": (0.0,)}, {"sample_prompts": "a.txt"}, None),
        ("sdxl_train.py", {"ema": True}, {"optimizer_type": "AdamWScheduleFree"}, "--ema does not support schedule-free"),
        ("sdxl_train.py", {"ema": True, "validation_split": 0.1}, {}, None),
        ("train_control_net.py", {"ema": True, "disable_patch": ("ema",)}, {}, None),
    ],
)
def test_runs_that_a_patch_cannot_take_part_in_are_an_error(script, settings, args, expected):
    findings = preflight.inspect(Path(script), Namespace(**args), Settings(**settings))
    names = ("--ema", "--validation_split", "--early_stopping", "--sample_multipliers")
    errors = [error for error in findings.errors if any(name in error for name in names)]
    assert [expected in error for error in errors] == [True] * (expected is not None)


@pytest.mark.parametrize("name", ["logs", "logs/of/runs"])
def test_logging_folder_that_is_a_file_is_an_error(tmp_path, name):
    args = {"output_dir": str(tmp_path), "logging_dir": str(tmp_path / name)}
    assert not check(output.check, **args).errors
    (tmp_path / "logs").touch()
    (error,) = check(output.check, **args).errors
    assert error == f"--logging_dir {tmp_path / name} cannot be a folder: {tmp_path / 'logs'} is a file"


@pytest.mark.parametrize("connected", [False, True])
def test_missing_tokenizers_are_an_error_without_a_connection(tmp_path, monkeypatch, connected):
    hub_library = pytest.importorskip("huggingface_hub")
    utils = pytest.importorskip("huggingface_hub.utils")  # the package alone does not import it
    asked = []

    def head(address, timeout):
        asked.append(address)
        if not connected:
            raise OSError("no route to host")

    monkeypatch.setattr(utils, "get_session", lambda: Namespace(head=head))
    monkeypatch.setattr(hub_library, "try_to_load_from_cache", lambda name, file, cache_dir: saved.get(name))
    saved = {"openai/clip-vit-large-patch14": "in the cache"}
    findings = check(hub.check, "flux_train.py", tokenizer_cache_dir=str(tmp_path))
    assert len(asked) == 1
    assert ["google/t5-v1_1-xxl, which flux_train.py needs" in error for error in findings.errors] == [True] * (not connected)
    (tmp_path / "google_t5-v1_1-xxl").mkdir()
    assert not check(hub.check, "flux_train.py", tokenizer_cache_dir=str(tmp_path)).errors
    assert len(asked) == 1, "a complete cache needs no connection"
    # What a Diffusers model needs, upstream asks for at the end of the training.
    file = write_safetensors(tmp_path / "model.safetensors", ["x"])
    run = {"pretrained_model_name_or_path": str(file), "save_model_as": "diffusers"}
    errors = check(hub.check, "train_db.py", **run).errors
    assert ["use --save_model_as safetensors" in error for error in errors] == [True] * (not connected)
    assert not check(hub.check, "train_network.py", **run).errors
    assert not check(hub.check, "train_db.py", **{**run, "pretrained_model_name_or_path": str(tmp_path)}).errors


def test_failing_check_does_not_stop_the_run(monkeypatch):
    def broken(script, args, findings, **more):
        raise RuntimeError("bug in a check")

    for module in (options, models, data, output, hub):
        monkeypatch.setattr(module, "check", broken)
    findings = preflight.inspect(Path("sdxl_train.py"), Namespace(), Settings())
    assert not findings.errors
    assert all("bug in a check" in warning for warning in findings.warnings)


@pytest.mark.parametrize(
    ("gpu", "cuda", "line"),
    [
        (None, None, "PyTorch finds no GPU: training on the CPU"),
        ("RTX 4070", None, "is a build without CUDA: training on the CPU, not on the RTX 4070; install the CUDA build"),
        ("RTX 4070", "12.8", "PyTorch cannot use the RTX 4070: training on the CPU; install a driver for CUDA 12.8 or newer"),
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True])
def test_training_on_the_cpu_is_explained(monkeypatch, has_gpu, gpu, cuda, line):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(preflight, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(installed_gpus, "first_gpu", lambda: gpu and InstalledGpu(gpu, 12 * 2**30))
    findings = preflight.inspect(Path("sdxl_train.py"), Namespace(), Settings())
    explained = [each for each in (*findings.notes, *findings.warnings) if "training on the CPU" in each]
    assert [line in each for each in explained] == [True] * (not has_gpu)


LIBRARY = "def read_config_from_file(args, parser):\n    return parser.parse_args()\n"
SCRIPT = "import argparse\nfrom library import args\n\ndef setup_parser():\n    return argparse.ArgumentParser()\n"


@pytest.mark.parametrize(("count", "end"), [(0, "all checks passed"), (1, "1 warning"), (2, "2 warnings")])
def test_check_counts_its_warnings(tmp_path, monkeypatch, capsys, count, end):
    checkout = Checkout(tmp_path, "0.11.1", "v0.11", "for this test")
    script = tmp_path / "train_cat.py"
    script.write_text(SCRIPT)
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "args.py").write_text(LIBRARY)
    for name in ("library", "library.args"):  # restored after the test
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.setattr(sys, "argv", [])
    question = Question(checkout, CommandLine(script, [], {}), {})
    monkeypatch.setattr(training_command, "read", lambda *about: question)
    findings = preflight.Findings(warnings=["no captions"] * count)
    monkeypatch.setattr(preflight, "inspect", lambda script, args, settings: findings)
    assert check_command.run(Namespace()) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"kohya_ext: train_cat.py can start; {end}"


def test_dynamo_backend_that_sd_scripts_overrides_is_noted(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    (note,) = check(options.check, "sdxl_train.py").notes
    assert note.startswith("ACCELERATE_DYNAMO_BACKEND=INDUCTOR has no effect with sd-scripts; use --selective_torch")
    assert not check(options.check, "sdxl_train.py", torch_compile=True).notes
