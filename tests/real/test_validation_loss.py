"""The validation loss of the fine-tuning scripts is that of the LoRA scripts, and training does not notice it."""

import json
import re

import pytest

from kohya_ext.tiny import dataset
from kohya_ext.tiny.arguments import OUTPUT_NAME
from tests.real.test_notifications import scalars

torch = pytest.importorskip("torch")

FULL, LORA = "sdxl_train.py", "sdxl_train_network.py"
SPLIT = ("--validation_split", "0.5", "--validation_seed", "3")
OTHERS = ("flux_train.py", "sd3_train.py", "lumina_train.py", "anima_train.py", "train_db.py", "fine_tune.py")


def validations(run) -> list[dict]:
    lines = map(json.loads, (run.folder / f"{OUTPUT_NAME}.journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "validation"]


def images_trained(run) -> int:
    return int(re.search(r"num (?:examples|train images).*: (\d+)", run.output)[1])


@pytest.mark.parametrize("script", [FULL, *(pytest.param(script, marks=pytest.mark.slow) for script in OTHERS)])
def test_training_is_the_same_with_and_without_validation(checkout, train, script):
    text = ("--cache_text_encoder_outputs",) if script in ("flux_train.py", "lumina_train.py", "anima_train.py") else ()
    run = train(checkout, script, *SPLIT, "--validate_every_n_steps", "3", *text)
    # fine_tune.py needs the patch for the split, so that its reference never validates.
    off = ("--disable_patch", "validation_loss") if script != "fine_tune.py" else ("--validate_every_n_epochs", "99")
    other = train(checkout, script, *SPLIT, *off, *text)
    assert run.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in other.tensors.items())
    assert images_trained(run) == images_trained(other) == 2 * (1 if script == "fine_tune.py" else 2)

    lines = validations(run)
    # fine_tune.py has no repeats, so its epochs have two steps.
    assert [line["step"] for line in lines] == ([2, 3, 4] if script == "fine_tune.py" else [3, 4])
    assert lines[0]["loss"] != lines[-1]["loss"]
    assert not validations(other)


@pytest.mark.slow
def test_loss_is_that_of_the_lora_script_for_the_same_weights(checkout, train, tmp_path):
    pytest.importorskip("tensorboard")
    dataset.write(tmp_path / "images", 4, 128)
    values = {}
    for script in (FULL, LORA):
        # A single image, because the order of several depends on random numbers that were drawn before.
        options = (
            "--validation_split",
            "0.25",
            "--validation_seed",
            "3",
            "--learning_rate",
            "1e-30",
            "--validate_every_n_steps",
            "2",
        )
        # The VAE samples latents, so both scripts read the same ones.
        options += ("--train_data_dir", str(tmp_path / "images"), "--cache_latents_to_disk")
        log = ("--log_with", "tensorboard", "--logging_dir", str(tmp_path / script))
        run = train(checkout, script, *options, *log)
        assert run.code == 0, run.output[-3000:]
        values[script] = {name: rows for name, rows in scalars(tmp_path / script).items() if "validation" in name}
    ours, theirs = (values[script]["loss/validation/step_average"] for script in (FULL, LORA))
    assert [step for step, _ in ours] == [step for step, _ in theirs] == [2, 4]
    assert ours[0][1] == ours[1][1] == pytest.approx(theirs[0][1], rel=1e-5)
    assert values[FULL].keys() == values[LORA].keys()
    epochs = [values[script]["loss/validation/epoch_average"] for script in (FULL, LORA)]
    assert [step for step, _ in epochs[0]] == [step for step, _ in epochs[1]]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_textual_inversion.py", "sdxl_train_control_net.py"])
def test_other_scripts_refuse_the_option(checkout, train, script):
    run = train(checkout, script, *SPLIT)
    assert run.code == 2
    assert "error: --validation_split: " in run.output
