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


#: Moment -> its output, or the number of finished steps; and the exit code.
MOMENTS = {"caching": (b"caching latents", 143), "a step": (3, 143), "sampling": (b"sampling with the multipliers", 0)}


def is_reached(moment, printed):
    """Return whether a run that has printed this has reached a moment."""
    if isinstance(moment, bytes):
        return moment in printed
    return any(int(step) >= moment for step in PROGRESS.findall(printed))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=() if each == "a step" else pytest.mark.newest) for each in MOMENTS]
)
def test_the_same_command_continues_after_a_stop(checkout, models, tmp_path, moment):
    tiny = models("sdxl")
    dataset.write(tmp_path / "images", 4, 128)
    (folder,) = (path for path in (tmp_path / "images").iterdir() if path.is_dir())
    output = tmp_path / "output"
    own = ("--model", str(tiny.files["pretrained_model_name_or_path"]), "--output", str(output), "--name", "cat", "--yes")
    words = [*own, "--sd-scripts", str(checkout.path), *TINY, "--tokenizer_cache_dir", str(tiny.tokenizers)]

    def train(stop_at=None):
        """Return the exit code and the output of a run, which is stopped at a moment."""
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
            if stop_at is not None and is_reached(stop_at, printed):
                process.send_signal(signal.SIGTERM)
                stop_at = None
        return process.wait(), printed.decode(errors="replace")

    at, expected = MOMENTS[moment]
    code, printed = train(at)
    assert code == expected, printed[-3000:]
    states, model = [*output.glob("*-state")], output / "cat.safetensors"
    saved = model.read_bytes() if model.is_file() else b""
    assert ([resume.state_problem(state) for state in states], bool(saved)) == (
        [None] * (moment == "a step"),
        moment == "sampling",
    )

    code, printed = train()
    assert code == 0, printed[-3000:]
    assert [state for state in states if f"resuming from {state}" not in printed] == []
    assert ("cat.safetensors is complete" in printed) == bool(saved)
    if saved:  # all was trained: the command trains once more, and keeps the file
        assert (output / "cat.previous.safetensors").read_bytes() == saved
    assert (output / "cat.safetensors").stat().st_size > 1000
    assert (output / "cat.report.html").is_file()
    assert {file.name.split("_")[0] for file in (output / "sample").iterdir()} == {
        f"cat-multiplier-{x}" for x in ("0", "0.5", "1")
    }
    assert "judgement: cat.safetensors changes the weights of the U-Net by" in printed
