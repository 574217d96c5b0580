"""`train FOLDER --model FILE`: the command for a folder of images, what it asks for, and when it starts."""

import json
import math
import struct
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from kohya_ext.commands import train
from kohya_ext.errors import UserError
from kohya_ext.planning import automatic, from_folder
from tests.unit.test_plan import checkout as checkout

MODELS = {
    "SDXL": ("conditioner.embedders.1.model.ln_final.weight",),
    "SD 2": ("cond_stage_model.model.ln_final.weight",),
    "FLUX": ("double_blocks.0.img_attn.qkv.weight",),
    "Chroma": ("double_blocks.0.img_attn.qkv.weight", "distilled_guidance_layer.in_proj.weight"),
    "LoRA": ("lora_unet_x.lora_down.weight",),
    "other": ("x",),
}


@pytest.fixture
def model(tmp_path):
    """kind -> a file with the names of its tensors, which are empty."""

    def write(kind):
        header = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in MODELS[kind]}
        encoded = json.dumps(header).encode()
        file = tmp_path / f"{kind}.safetensors"
        file.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
        return file

    return write


def images(folder, count, extension=None):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").touch()
        if extension:
            (folder / f"{number}{extension}").write_text("a cat")
    return folder


def planned(checkout, folder, model, *words):
    given = (*words, *(() if "--preset" in words else ("--preset", "12gb")))
    return from_folder.of(folder, model, folder.parent / "output", "cat", checkout.script, given, automatic)


@pytest.mark.parametrize(
    ("count", "words", "steps"),
    [
        (20, (), 2000),
        (3, (), 1000),
        (500, (), 6000),
        (20, ("--train_batch_size", "4"), 500),
        (20, ("--gradient_accumulation_steps", "3"), 667),
        (20, ("--max_train_steps", "7"), 7),
    ],
)
def test_the_number_of_steps_follows_the_rule_or_the_user(checkout, tmp_path, model, count, words, steps):
    run = planned(checkout, images(tmp_path / "cats", count), model("SDXL"), *words)
    assert run.command.values["max_train_steps"] == steps
    assert run.by_rule is ("--max_train_steps" not in words)


def test_epochs_of_the_user_replace_steps(checkout, tmp_path, model):
    run = planned(checkout, images(tmp_path / "cats", 5), model("SDXL"), "--max_train_epochs", "3")
    assert "max_train_steps" not in run.command.values


@pytest.mark.parametrize(
    ("count", "words", "expected"),
    [
        (19, (), None),
        (20, (), (0.1, 6, 5)),  # 2,000 steps are 111 epochs of 18 images
        (500, (), (0.032, 1, 5)),  # 16 of 500
        (20, ("--validation_split", "0.3", "--early_stopping", "2"), (0.3, 6, 2)),
        (20, ("--max_train_epochs", "60"), (0.1, 3, 5)),
    ],
)
def test_some_of_enough_images_are_held_out(checkout, tmp_path, model, count, words, expected):
    (checkout.path / "train_network.py").write_text('parser.add_argument("--validation_split")')
    values = planned(checkout, images(tmp_path / "cats", count), model("SDXL"), *words).command.values
    names = ("validation_split", "validate_every_n_epochs", "early_stopping")
    assert tuple(values.get(name) for name in names) == (expected or (None,) * 3)


def test_as_many_images_are_held_out_as_shown_and_none_is_trained_on(tmp_path):
    """Upstream divides each folder, and rounds both numbers."""
    for count in range(from_folder.HELD_OUT_FROM, 400):
        whole = from_folder.Images(tmp_path, count, Counter(), False, count, (count,))
        fraction = whole.fraction(whole.held_out)
        assert (
            count - math.ceil(count * (1 - fraction))
            == round(count * fraction)
            == whole.held_out
            == whole.held_out_by(fraction)
        )
    classes = from_folder.Images(tmp_path, 22, Counter(), True, 22, (10, 12))
    assert classes.held_out_by(classes.fraction(2)) == 2
    single = from_folder.Images(tmp_path, 20, Counter(), True, 20, (1,) * 20)
    assert single.fraction(2) is None, "all images would be held out"


def test_no_image_is_held_out_on_request_and_by_a_release_that_cannot(checkout, tmp_path, model):
    folder = images(tmp_path / "cats", 40)
    assert "early_stopping" not in planned(checkout, folder, model("SDXL")).command.values
    (checkout.path / "train_network.py").write_text('parser.add_argument("--validation_split")')
    words = ("--preset", "12gb")
    run = from_folder.of(folder, model("SDXL"), tmp_path, "cat", checkout.script, words, automatic, held_out=0)
    assert "early_stopping" not in run.command.values


def test_images_without_captions_get_the_name(checkout, tmp_path, model):
    file, text = planned(checkout, images(tmp_path / "cats", 5), model("SDXL")).dataset
    assert file == tmp_path / "output" / "cat.dataset.toml"
    assert 'class_tokens = "cat"' in text
    assert 'caption_extension = ".txt"' in text


def test_the_most_common_captions_are_used(checkout, tmp_path, model):
    folder = images(tmp_path / "cats", 5, ".caption")
    (folder / "0.txt").write_text("a cat")
    _, text = planned(checkout, folder, model("SDXL")).dataset
    assert 'caption_extension = ".caption"' in text


@pytest.mark.parametrize(
    ("caption", "lines"),
    [
        ("cat, on a sofa --n dog", ["cat, on a sofa", "on a sofa"]),
        ("# a Cat", ["a Cat", "a"]),
        ("cat", ["cat", "a photograph of a landscape"]),
        ("on a sofa", ["on a sofa"]),
    ],
)
def test_samples_after_training_have_a_prompt_without_the_trigger(checkout, tmp_path, model, caption, lines):
    folder = images(tmp_path / "cats", 3, ".txt")
    (folder / "0.txt").write_text(caption)
    run = planned(checkout, folder, model("SDXL"), "--resolution", "768,512")
    _, text = from_folder.sampled(run, tmp_path / "cat.prompts.txt", "cat").prompts
    assert text.splitlines() == [f"{line} --w 768 --h 512 --s 20 --d 1" for line in lines]


def test_prompts_of_the_user_stay(checkout, tmp_path, model):
    run = planned(checkout, images(tmp_path / "cats", 3), model("SDXL"), "--sample_prompts", "mine.txt")
    assert from_folder.sampled(run, tmp_path / "cat.prompts.txt", "cat") is run


def test_folders_with_repeats_stay_as_they_are(checkout, tmp_path, model):
    images(tmp_path / "data" / "10_cat", 4, ".txt")
    images(tmp_path / "data" / "1_cats", 8, ".txt")
    run = planned(checkout, tmp_path / "data", model("SDXL"))
    assert run.dataset is None
    assert run.command.values["train_data_dir"] == str(tmp_path / "data")
    assert run.command.values["caption_extension"] == ".txt"
    assert run.images.count == 12


@pytest.mark.parametrize(
    ("kind", "script", "option"),
    [
        ("SDXL", "sdxl_train_network.py", None),
        ("SD 2", "train_network.py", "v2"),
        ("Chroma", "flux_train_network.py", "model_type"),
    ],
)
def test_the_script_is_that_of_the_model(checkout, tmp_path, model, kind, script, option):
    files = ("--t5xxl", "t5.safetensors", "--ae", "ae.safetensors", "--preset", "12gb")
    run = planned(checkout, images(tmp_path / "cats", 5), model(kind), *files)
    assert run.command.name == script
    assert option is None or option in run.command.values


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("LoRA", "is a LoRA; give the base model"),
        ("other", "is not a model that sd-scripts trains"),
        ("FLUX", "FLUX needs more files; add --clip_l FILE"),
    ],
)
def test_a_model_that_cannot_be_trained_is_an_error(checkout, tmp_path, model, kind, message):
    with pytest.raises(UserError, match=message):
        planned(checkout, images(tmp_path / "cats", 5), model(kind))


def test_a_folder_without_images_and_a_missing_model_are_errors(checkout, tmp_path, model):
    with pytest.raises(UserError, match="has no images"):
        planned(checkout, images(tmp_path / "cats", 0), model("SDXL"))
    with pytest.raises(UserError, match="is not a folder of images"):
        planned(checkout, tmp_path / "dogs", model("SDXL"))
    with pytest.raises(UserError, match=r"missing.safetensors: .+; give a checkpoint"):
        planned(checkout, images(tmp_path / "cats", 1), tmp_path / "missing.safetensors")
    images(tmp_path / "cats" / "2_more", 1)
    with pytest.raises(UserError, match="move them into one or the other"):
        planned(checkout, tmp_path / "cats", model("SDXL"))


class Terminal:
    """Standard input; ``answer`` is None where it is not a terminal."""

    def __init__(self, answer):
        self.answer = answer

    def isatty(self):
        return self.answer is not None

    def readline(self):
        return f"{self.answer}\n"


def start(checkout, tmp_path, model, monkeypatch, answer, *words, during=lambda: -15):
    """Run the command; return its exit code and the started processes. ``during``: their training; returns the exit code."""
    started = []

    class Process:
        def __init__(self, command):
            started.append(command)

        def wait(self):
            return during()

        def terminate(self):
            """Ignore the signal."""

    monkeypatch.setattr(train.subprocess, "Popen", Process)
    monkeypatch.setattr(train, "find_or_fetch", lambda folder, script: checkout)
    monkeypatch.setattr(train.sys, "stdin", Terminal(answer))
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    folder = images(tmp_path / "cats", 5)
    given = ["--model", str(model("SDXL")), "--output", str(tmp_path / "output"), "--preset", "12gb", *words]
    arguments = Namespace(folder=folder, arguments=given, words=[str(folder), *given])
    return train.run(arguments), started


@pytest.mark.parametrize(("answer", "starts"), [("", True), ("y", True), ("n", False), ("no", False)])
def test_it_asks_before_it_starts(checkout, tmp_path, model, monkeypatch, capsys, answer, starts):
    code, started = start(checkout, tmp_path, model, monkeypatch, answer)
    assert code == (143 if starts else 0)
    assert len(started) == starts
    assert (tmp_path / "output" / "cats.dataset.toml").exists() is starts
    printed = capsys.readouterr().out
    assert "sdxl_train_network.py" in printed
    assert "the rule: 100 times" in printed


def test_without_a_terminal_it_needs_a_word(checkout, tmp_path, model, monkeypatch):
    with pytest.raises(UserError, match="add --yes"):
        start(checkout, tmp_path, model, monkeypatch, None)
    code, started = start(checkout, tmp_path, model, monkeypatch, None, "--yes")
    assert (code, len(started)) == (143, 1)
    assert "--yes" not in started[0]


def test_another_training_set_is_not_replaced(checkout, tmp_path, model, monkeypatch):
    file = tmp_path / "output" / "cats.dataset.toml"
    file.parent.mkdir()
    file.write_text("# mine\n")
    with pytest.raises(UserError, match="exists and is another one"):
        start(checkout, tmp_path, model, monkeypatch, "y")
    assert file.read_text() == "# mine\n"


def test_model_is_required(tmp_path):
    with pytest.raises(UserError, match="--model is missing"):
        train.run(Namespace(folder=Path("x"), arguments=[], words=["x"]))
