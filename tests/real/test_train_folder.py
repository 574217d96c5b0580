"""`train FOLDER --model FILE` with the real script: stopped, and resumed by the same command."""

import os
import signal
import subprocess
import sys

import pytest

from kohya_ext.run import resume
from kohya_ext.tiny import dataset, environment
from tests.real.conftest import PROGRESS, ROOT

#: For a tiny model on a CPU, which has no preset.
TINY = (
    *("--preset", "8gb", "--mixed_precision", "no", "--no_half_vae", "--resolution", "128,128", "--speed", "off"),
    *("--network_dim", "4", "--network_alpha", "1", "--max_train_steps", "12"),
)


@pytest.mark.newest
@pytest.mark.thorough
def test_the_same_command_resumes_after_a_stop(checkout, models, tmp_path):
    tiny = models("sdxl")
    dataset.write(tmp_path / "images", 4, 128)
    (folder,) = (path for path in (tmp_path / "images").iterdir() if path.is_dir())
    output = tmp_path / "output"
    own = ("--model", str(tiny.files["pretrained_model_name_or_path"]), "--output", str(output), "--name", "cat", "--yes")
    words = [*own, "--sd-scripts", str(checkout.path), *TINY, "--tokenizer_cache_dir", str(tiny.tokenizers)]

    def train(stop_at=None):
        process = subprocess.Popen(
            [sys.executable, "-m", "kohya_ext", "train", str(folder), *words],
            env={**os.environ, **environment.variables(tiny.tokenizers)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        printed = b""
        while chunk := os.read(process.stdout.fileno(), 65536):
            printed += chunk
            if stop_at is not None and any(int(step) >= stop_at for step in PROGRESS.findall(printed)):
                process.send_signal(signal.SIGTERM)
                stop_at = None
        return process.wait(), printed.decode(errors="replace")

    code, printed = train(stop_at=3)
    assert code == 143, printed[-3000:]
    (state,) = output.glob("*-state")
    assert resume.state_problem(state) is None
    code, printed = train()
    assert code == 0, printed[-3000:]
    assert f"resuming from {state}" in printed
    assert (output / "cat.safetensors").stat().st_size > 1000
    assert (output / "cat.report.html").is_file()
    assert {file.name.split("_")[0] for file in (output / "sample").iterdir()} == {
        f"cat-multiplier-{x}" for x in ("0", "0.5", "1")
    }
    assert "judgement: cat.safetensors changes the weights of the U-Net by" in printed
