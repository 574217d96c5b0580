"""What a preflight finds in files and arguments."""

import json
import struct
from argparse import Namespace
from pathlib import Path

import pytest

from kohya_ext import preflight
from kohya_ext.preflight import choices, data, models, output
from kohya_ext.safetensors_header import read_header
from kohya_ext.settings import Settings

image = pytest.importorskip("PIL.Image")


def found(look, script="sdxl_train_network.py", settings=None, **args):
    findings = preflight.Findings()
    more = {"settings": settings or Settings()} if look is output.look else {}
    look(Path("/sd-scripts") / script, Namespace(**args), findings, **more)
    return findings


def write_safetensors(file, names, cut=0):
    rows = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)}
    header = json.dumps(rows).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4 * len(names))
    file.write_bytes(content[: len(content) - cut])
    return file


# --- model files -----------------------------------------------------------------------------------------------------


def test_a_header_is_read(tmp_path):
    header = read_header(write_safetensors(tmp_path / "x.safetensors", ["a", "b"]))
    assert header.shapes == {"a": (1,), "b": (1,)}


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "0 bytes"), (b"hello world, this is text", "not a safetensors"), (b"12", "not a safetensors")],
)
def test_what_is_no_safetensors_file_is_said(tmp_path, content, said):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_header(tmp_path / "x.safetensors")


def test_a_truncated_file_is_said(tmp_path):
    with pytest.raises(ValueError, match="truncated"):
        read_header(write_safetensors(tmp_path / "x.safetensors", ["a"], cut=1))


@pytest.mark.parametrize(
    ("tensor", "script", "more", "said"),
    [
        ("cond_stage_model.transformer.x", "sdxl_train.py", {}, "SD 1.5, and sdxl_train.py wants SDXL: fine_tune.py trains it"),
        ("conditioner.embedders.1.model.x", "train_network.py", {}, "wants SD 1.5: sdxl_train_network.py trains it"),
        ("cond_stage_model.model.x", "train_network.py", {"v2": False}, "SD 2, and train_network.py wants SD 1.5"),
        ("cond_stage_model.model.x", "train_network.py", {"v2": True}, None),
        ("model.diffusion_model.double_blocks.0.img_attn.x", "flux_train_network.py", {}, None),
        ("distilled_guidance_layer.x", "flux_train_network.py", {}, "Chroma"),
        ("distilled_guidance_layer.x", "flux_train_network.py", {"model_type": "chroma"}, None),
        ("lora_unet_x.lora_down.weight", "sdxl_train.py", {}, "of the family LoRA"),
        ("something.else", "sdxl_train.py", {}, None),
    ],
)
def test_a_checkpoint_of_another_family_is_named(tmp_path, tensor, script, more, said):
    file = write_safetensors(tmp_path / "model.safetensors", [tensor])
    errors = found(models.look, script, pretrained_model_name_or_path=str(file), **more).errors
    assert (said is None and not errors) or (len(errors) == 1 and said in errors[0])


def test_a_model_that_is_not_there_is_told_from_a_repository(tmp_path):
    assert found(models.look, pretrained_model_name_or_path=str(tmp_path / "no.safetensors")).errors
    assert not found(models.look, pretrained_model_name_or_path="stabilityai/sdxl").errors
    assert found(models.look, pretrained_model_name_or_path=None).errors


# --- the training set ------------------------------------------------------------------------------------------------


def write_pictures(folder, count=2, captions=True):
    folder.mkdir(parents=True)
    for at in range(count):
        image.new("RGB", (64, 64), (at, 0, 0)).save(folder / f"{at}.png")
        if captions:
            (folder / f"{at}.txt").write_text("a cat")
    return folder


ARGS = {"resolution": "64", "caption_extension": ".txt", "max_train_steps": 20, "train_batch_size": 2}


def test_steps_are_counted(tmp_path):
    write_pictures(tmp_path / "5_cat")
    findings = found(data.look, train_data_dir=str(tmp_path), **ARGS)
    assert not findings.errors
    assert not findings.warnings
    assert findings.notes == ["2 images, 10 with repeats, about 5 steps an epoch; 20 steps in all, 4 epochs"]


@pytest.mark.parametrize(
    ("folder", "said"),
    [("missing", "does not exist"), ("no_number", "no subfolder named N_name"), ("inside", "holds the images itself")],
)
def test_a_folder_that_upstream_would_train_nothing_from(tmp_path, folder, said):
    write_pictures(tmp_path / "no_number" / "cat")
    write_pictures(tmp_path / "inside")
    (error,) = found(data.look, train_data_dir=str(tmp_path / folder), **ARGS).errors
    assert said in error


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp"])
def test_a_truncated_picture_is_found(tmp_path, kind):
    whole, cut = tmp_path / f"whole.{kind}", tmp_path / f"cut.{kind}"
    image.effect_noise((200, 200), 50).convert("RGB").save(whole)
    cut.write_bytes(whole.read_bytes()[:-2000])
    assert data.picture_problem(whole) == (None, (200, 200))
    assert data.picture_problem(cut)[0].startswith("is broken")


def test_an_empty_picture_and_one_that_is_none_are_found(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "b.jpg").write_text("hello")
    assert data.picture_problem(tmp_path / "a.png")[0] == "is empty (0 bytes)"
    assert "not an image" in data.picture_problem(tmp_path / "b.jpg")[0]


def test_captions_are_counted_and_the_other_extension_is_offered(tmp_path):
    write_pictures(tmp_path / "1_cat", 3)
    (warning,) = found(data.look, train_data_dir=str(tmp_path), **{**ARGS, "caption_extension": ".caption"}).warnings
    assert "3 of 3 images" in warning
    assert "'cat' alone" in warning
    assert "--caption_extension .txt" in warning


def test_a_dataset_config_is_followed(tmp_path):
    write_pictures(tmp_path / "cats")
    config = tmp_path / "data.toml"
    config.write_text(
        f'[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 64\n'
        f"[[datasets.subsets]]\nimage_dir = {str(tmp_path / 'cats')!r}\nnum_repeats = 3\n"
        f"[[datasets.subsets]]\nimage_dir = {str(tmp_path / 'dogs')!r}\n"
    )
    (error,) = found(data.look, dataset_config=str(config), max_train_steps=3).errors
    assert "dogs does not exist" in error


# --- output and choices ----------------------------------------------------------------------------------------------


def test_an_earlier_output_is_named_and_what_a_killed_run_left_goes(tmp_path):
    for name in ("cat.safetensors", "cat-step00000010.safetensors.partial", "catch.safetensors.partial"):
        (tmp_path / name).touch()
    (tmp_path / "cat-rolling00000010-state.partial").mkdir()
    args = {"output_dir": str(tmp_path), "output_name": "cat", "pretrained_model_name_or_path": ""}
    findings = found(output.look, **args)
    (warning,) = findings.warnings
    assert warning.endswith("it becomes cat.previous.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat.safetensors", "catch.safetensors.partial"]


def test_an_output_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    (error,) = found(output.look, output_dir=str(tmp_path / "file" / "out")).errors
    assert "cannot be written to" in error
    assert found(output.look, output_dir=None).errors


@pytest.mark.parametrize(
    ("script", "args", "said"),
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
        ("sdxl_train.py", {"lr_scheduler": "cosin"}, "Did you mean cosine?"),
        ("sdxl_train.py", {"optimizer_args": ["weight_decay"]}, "name=value"),
        ("sdxl_train.py", {"v2": True, "pretrained_model_name_or_path": "x"}, "--v2"),
        ("flux_train.py", {"blocks_to_swap": 5, "cpu_offload_checkpointing": True}, "--cpu_offload_checkpointing"),
        ("sdxl_train.py", {"enable_bucket": True, "bucket_reso_steps": 16}, "multiple of 32"),
    ],
)
def test_what_cannot_work_is_said(script, args, said):
    (error,) = found(choices.look, script, **args).errors
    assert said in error


def test_what_a_single_subset_of_a_dataset_config_cannot_do_is_said(tmp_path):
    config = tmp_path / "data.toml"
    config.write_text(
        "[general]\nshuffle_caption = true\n[[datasets]]\n"
        '[[datasets.subsets]]\nimage_dir = "cats"\nshuffle_caption = false\n'
        '[[datasets.subsets]]\nimage_dir = "dogs"\ncolor_aug = true\n'
    )
    args = {"cache_text_encoder_outputs": True, "cache_latents": True, "shuffle_caption": True}
    errors = found(choices.look, "sdxl_train.py", dataset_config=str(config), **args).errors
    assert [error.partition(": ")[0] for error in errors] == [f"{config}, dogs"] * 2
    assert "--shuffle_caption" in errors[0]
    assert "--color_aug" in errors[1]


def test_what_works_is_let_through():
    args = {"optimizer_type": "AdamW", "optimizer_args": ["weight_decay=0.1", "betas=(0.9,0.99)"], "lr_scheduler": "cosine"}
    pytest.importorskip("torch")
    assert not found(choices.look, "sdxl_train.py", mixed_precision="bf16", full_bf16=True, lr_warmup_steps=5, **args).errors


@pytest.mark.parametrize(
    ("package", "args", "said"),
    [
        ("torch", {"optimizer_type": "AdamW", "optimizer_args": ["weight_decy=0.1"]}, "Did you mean weight_decay?"),
        ("torch", {"optimizer_type": "AdamW", "optimizer_args": ["lr=0.1"]}, "--learning_rate says it"),
        ("prodigyopt", {"optimizer_type": "prodigy", "optimizer_args": ["d_coeff=2"]}, "Did you mean d_coef?"),
        ("bitsandbytes", {"optimizer_type": "PagedLion8bit", "optimizer_args": ["wight_decay=2"]}, "weight_decay?"),
        ("transformers", {"optimizer_type": "Adafactor", "optimizer_args": ["relative=True"]}, "relative_step?"),
        ("transformers", {"lr_scheduler": "cosine", "lr_scheduler_args": ["cycles=2"]}, "num_cycles?"),
        ("diffusers", {"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ["steps_rule='1:2,1'"]}, "step_rules?"),
        ("torch", {"lr_scheduler_type": "StepLR", "lr_scheduler_args": ["step_sze=2"]}, "Did you mean step_size?"),
    ],
)
def test_an_optimizers_and_a_schedulers_own_arguments_are_checked(package, args, said):
    pytest.importorskip(package)
    (error,) = found(choices.look, "sdxl_train.py", **args).errors
    assert said in error


def test_what_a_network_would_ignore_is_said(tmp_path):
    (tmp_path / "networks").mkdir()
    (tmp_path / "networks" / "__init__.py").touch()
    (tmp_path / "networks" / "lora.py").write_text('def create_network(**kwargs):\n    dim = kwargs.get("conv_dim")\n')
    script = tmp_path / "sdxl_train_network.py"
    findings = preflight.Findings()
    args = Namespace(network_module="networks.lora", network_args=["conv_dim=4", "conf_dim=4"])
    choices.look(script, args, findings)
    (warning,) = findings.warnings
    assert warning == "--network_args: networks.lora does not know conf_dim and will ignore it. Did you mean conv_dim?"


def test_a_check_that_fails_does_not_stop_the_run(monkeypatch):
    def broken(script, args, findings, **more):
        raise RuntimeError("a bug")

    for module in (choices, models, data, output):
        monkeypatch.setattr(module, "look", broken)
    findings = preflight.inspect(Path("sdxl_train.py"), Namespace(), Settings())
    assert not findings.errors
    assert all("a bug" in warning for warning in findings.warnings)


def test_a_dynamo_backend_that_sd_scripts_overrules_is_pointed_out(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    (said,) = found(choices.look, "sdxl_train.py").notes
    assert said.startswith("ACCELERATE_DYNAMO_BACKEND=INDUCTOR does nothing: sd-scripts overrules it. Use --selective_torch")
    assert not found(choices.look, "sdxl_train.py", torch_compile=True).notes
