"""Dry runs of the real scripts on tiny models: their results, and the files after their end."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from kohya_ext.dry_run.request import REQUEST
from kohya_ext.run.safetensors_header import read_header
from kohya_ext.tiny import arguments, environment
from tests.real.test_losing_nothing import posix

torch = pytest.importorskip("torch")


@pytest.fixture
def estimate(models, images, call, tmp_path, monkeypatch):
    """``estimate(checkout, script, *more words)`` estimates a tiny run, with temporary files in an empty folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def run(checkout, script, *more):
        tiny = models(arguments.SCRIPTS[script][0])
        words = arguments.training_arguments(script, tiny, images, tmp_path / "output")
        command = ("-m", "kohya_ext", "estimate", "--json", "--sd-scripts", checkout.path, script, *words, *more)
        variables = environment.variables(tiny.tokenizers) | {"KOHYA_EXT_CACHE": str(tmp_path / "cache")}
        return call(*command, bare=True, **variables)  # a fork of this interpreter knows another folder for temporary files

    return run


def read(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


LORA = ("sdxl_train_network.py", "--cache_text_encoder_outputs", "--network_train_unet_only")


@pytest.mark.newest
@pytest.mark.thorough
def test_the_weights_are_those_of_the_files(estimate, checkout, models, tmp_path):
    row = read(estimate(checkout, *LORA))
    assert row["parts"]["weights"] == weights(models("sdxl"))
    assert row["parts"]["trained weights"] == 4 * row["trainable_parameters"]
    assert row["trained_tensors"] % 2 == 0, "down and up"
    assert row["phase_peaks"].keys() >= {"caching text encoder outputs", "forward", "backward", "optimizer step"}
    assert not (tmp_path / "output").exists()


def weights(tiny):
    """Return the bytes of a file's U-Net."""
    header = read_header(tiny.files["pretrained_model_name_or_path"])
    return sum(end - begin for name, (begin, end) in header.places.items() if name.startswith("model.diffusion_model."))


@pytest.mark.newest
@pytest.mark.thorough
def test_compiled_blocks_and_8_bits_are_run_dry(estimate, checkout, models):
    eager, compiled, eight_bits = (
        read(estimate(checkout, *LORA, *more)) for more in ((), ("--selective_torch_compile",), ("--base_precision", "int8"))
    )
    assert compiled["flops"] == pytest.approx(eager["flops"], rel=0.06)  # without products that nothing reads
    assert eight_bits["flops"] > eager["flops"], "rotations, in tiles that tiny layers do not fill"
    assert compiled["parts"]["weights"] == eager["parts"]["weights"]
    assert eight_bits["parts"]["weights"] < 0.7 * eager["parts"]["weights"]
    assert len({each["phase_peaks"]["forward"] for each in (eager, compiled, eight_bits)}) == 3


@pytest.mark.newest
@pytest.mark.thorough
@pytest.mark.parametrize("script", ["sdxl_train_network.py", "flux_train_network.py"])
def test_sample_images_are_sampled(estimate, checkout, tmp_path, script):
    prompts = tmp_path / "prompts.txt"
    words = ("--cache_text_encoder_outputs", "--network_train_unet_only", "--sample_prompts", prompts, "--sample_at_first")
    peaks = []
    for side in (256, 512):
        prompts.write_text(f"sks --w {side} --h {side}")
        peaks.append(read(estimate(checkout, script, *words))["phase_peaks"]["sampling"])
    assert peaks[1] > 1.5 * peaks[0]


@pytest.mark.newest
@pytest.mark.thorough
@pytest.mark.parametrize("script", ["sdxl_train.py", "sdxl_train_network.py"])
def test_the_first_of_two_processes_has_buckets_for_its_gradients(estimate, checkout, script):
    dry = read(estimate(checkout, script, "--num_processes", "2"))
    assert dry["parts"]["communication buffers"] == pytest.approx(4 * dry["trainable_parameters"], rel=0.01)


@pytest.mark.thorough
def test_a_script_without_another_estimate_is_estimated_and_then_known(estimate, checkout, models, tmp_path):
    script = "train_textual_inversion.py"
    row = read(estimate(checkout, script))
    assert row["parts"]["weights"] >= weights(models("sd15"))
    assert row["parts"]["trained weights"] == 4 * row["trainable_parameters"]
    assert row["phase_peaks"].keys() == {"loading", "caching latents", "forward", "backward", "optimizer step"}
    known = estimate(checkout, script)
    assert read(known) == row
    assert "dry run" not in known.stderr  # from the cache, which a start reads, too
    assert [*tmp_path.glob("kohya_ext_dry_run_*")] == []


@pytest.mark.newest
@pytest.mark.thorough
def test_a_script_that_fails_is_named_with_its_own_error(estimate, checkout, tmp_path):
    done = estimate(checkout, "train_textual_inversion.py", "--optimizer_type", "no_such_package.Optimizer")
    assert done.returncode == 2
    assert "the dry run of train_textual_inversion.py failed" in done.stderr
    assert "No module named 'no_such_package'" in done.stderr.splitlines()[-1]
    assert [*tmp_path.glob("kohya_ext_dry_run_*")] == []


@posix
@pytest.mark.newest
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_dry_run_leaves_nothing_behind(checkout, tmp_path, number):
    variables = {**os.environ, "PYTHONPATH": environment.python_path(), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "kohya_ext", "estimate", "--sd-scripts", str(checkout.path), "--fresh", "train_leco.py"]
    # A shell starts background jobs, such as these tests, without SIGINT.
    restore = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    parent = subprocess.Popen(words, env=variables, stderr=subprocess.DEVNULL, preexec_fn=restore)
    wait_for(lambda: [*tmp_path.glob(f"*/{REQUEST}")])
    wait_for(lambda: any(log.stat().st_size for log in tmp_path.glob("*/log.txt")))  # the script has begun
    parent.send_signal(number)
    parent.wait(timeout=60)
    wait_for(lambda: not [*tmp_path.glob("kohya_ext_dry_run_*")])


def wait_for(happens):
    """Return when something happens, which takes no fixed time."""
    while not happens():
        time.sleep(0.05)
