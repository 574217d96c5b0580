"""The processes of `tune` with the real scripts on a CPU: they measure and end, and write nothing of the run."""

import json
import os

import pytest

from kohya_ext.tuning import base_judgement, loss_record
from kohya_ext.tuning.child import only_training
from kohya_ext.tuning.task import Task

pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

SDXL, FLUX = "sdxl_train_network.py", "flux_train_network.py"
SAVING = ("--save_every_n_steps", "1", "--save_state", "--sample_every_n_steps", "1", "--sample_at_first")


def run(train, checkout, script, task, *more, off=None):
    variables = Task(**{"parent": os.getpid(), **task}).variables()
    return train(checkout, script, *more, "--disable_patch", ",".join(off or only_training()), env=variables)


def result_of(task):
    return json.loads(Task(**task).result.read_text())


@pytest.mark.parametrize("off", [None, ("*",)], ids=["typed", "upstream"])
def test_steps_are_measured_and_the_output_folder_stays_empty(checkout, train, tmp_path, off):
    (tmp_path / "prompts.txt").write_text("a cat")
    task = {"folder": str(tmp_path), "first": 2}
    trained = run(train, checkout, SDXL, task, *SAVING, "--sample_prompts", str(tmp_path / "prompts.txt"), off=off)
    assert trained.code == 0, trained.output[-4000:]
    result = result_of(task)
    assert all(step["seconds"] > step["waiting"] >= 0 and step["images"] == 1 for step in result["steps"])
    assert len(result["steps"]) >= 5
    assert {file.name for file in trained.folder.iterdir()} <= {"checkpoint_calls.json", "report.json"}
    assert not (tmp_path / "output").exists() or not any((tmp_path / "output").rglob("*.safetensors"))


@pytest.mark.parametrize("script", [SDXL, FLUX])
def test_losses_in_8_bits_are_compared_on_the_same_batches_and_noise(checkout, train, tmp_path, script):
    results = {}
    reference = ""
    for precision, own in ((None, {"precisions": ("int8", "fp8")}), ("int8", {})):
        folder = tmp_path / str(precision)
        folder.mkdir()
        task = {"folder": str(folder), "kind": "losses", "reference": reference, **own}
        words = ("--base_precision", precision) if precision else ()
        trained = run(train, checkout, script, task, "--mixed_precision", "bf16", "--speed", "off", *words)
        assert trained.code == 0, trained.output[-4000:]
        results[precision] = result_of(task)
        reference = str(folder / loss_record.OUTPUTS)
    judgement = base_judgement.judge("int8", results[None], results["int8"])
    assert judgement.batches == loss_record.BATCHES
    assert 0 < judgement.loss < 0.05
    assert judgement.noise < 0.05
    assert 0 < judgement.block < 0.2
    assert len(judgement.layers) > 20
    # Rounding of rows and weights to 8 bits alone (patches/base_precision.py).
    assert 0 < max(judgement.layers.values()) < 0.015 < max(results[None]["layers"]["fp8"].values()) < 0.05
