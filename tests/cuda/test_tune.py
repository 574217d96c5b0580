"""`tune` on the virtual GPU: a command and upstream's are measured; the measurements are kept, exported and used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kohya_ext.tiny import arguments, environment
from kohya_ext.tuning import cards
from tests.cuda.configurations import LORA
from tests.cuda.conftest import ROOT, SITE

pytest.importorskip("torch")

pytestmark = pytest.mark.thorough


@pytest.mark.newest
@pytest.mark.timeout(1500)  # the first start compiles and tests everything
def test_a_command_is_measured_kept_and_exported(checkout, models, images, gpu_environment, train_on_gpu, tmp_path):
    output, cache, card = tmp_path / "output", tmp_path / "cache", tmp_path / "card.json"
    tiny = models("sdxl")
    environ = {
        **gpu_environment(),
        **environment.variables(tiny.tokenizers),
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        "SPY_FILE": str(tmp_path / "record.json"),
        "KOHYA_EXT_CACHE": str(cache),
        "TUNE_WITHOUT_SEARCH": "1",
    }

    def tune(*words):
        command = [sys.executable, "-m", "kohya_ext", "tune", "--sd-scripts", str(checkout.path), *words]
        return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=1200)

    options = ("--mixed_precision", "bf16", "--speed", "auto")
    argv = [*arguments.training_arguments(LORA, tiny, images, output), *options]
    done = tune("--minutes", "18", LORA, *argv, "--export", str(card))
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout
    for name in ("upstream", "as typed"):
        row = next((line for line in printed.splitlines() if f" {name} " in line), "")
        assert " s \u00b1 " in row, printed + done.stderr[-4000:]
        assert "GB" in row
    assert f"python -m kohya_ext {LORA} --pretrained_model_name_or_path" in printed
    assert not output.exists(), "it writes nothing of the run"
    assert not (tmp_path / "record.json").exists() or not list(tmp_path.glob("*.safetensors"))
    exported = json.loads(card.read_text())
    assert cards.problems(exported) == []
    assert exported["gpu"]["name"] == "NVIDIA GeForce RTX 4090"
    assert [run["settings"]["disabled"] for run in exported["runs"]][:2] == [[], ["*"]]
    assert str(Path.home()) not in card.read_text()
    trained = train_on_gpu(checkout, LORA, *options, env={"KOHYA_EXT_CACHE": str(cache)})
    assert trained.code == 0, trained.output[-4000:]
    assert ", as found on " in trained.output, [line for line in trained.output.splitlines() if "speed" in line]
    (kept,) = (cache / "tunes").iterdir()
    kept.write_text("{")
    again = tune("--export", str(card))
    assert again.returncode == 2
    assert "nothing was measured on this GPU" in again.stderr
