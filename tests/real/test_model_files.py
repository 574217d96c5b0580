"""The table of tensor names holds for the files of every family, and `check` reports all problems of a run's files together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.run.safetensors_header import read_header  # noqa: E402
from kohya_ext.sdscripts import families, parts  # noqa: E402
from kohya_ext.tiny import arguments  # noqa: E402
from tests.real.conftest import ROOT, generations  # noqa: E402

MODEL = "pretrained_model_name_or_path"


def _part(family, option):
    return parts.of_name(family.name if option == MODEL else family.files[option])


@pytest.mark.thorough
@pytest.mark.parametrize("name", families.BY_NAME)
def test_tensors_missing_from_a_tiny_model_are_counted(models, name):
    if not generations():
        pytest.skip("no sd-scripts found")
    family = families.BY_NAME[name]
    for option, file in models(name).files.items():
        shapes, part = dict(read_header(file).shapes), _part(family, option)
        complete = parts.contents(shapes, part)
        assert (complete.missing, complete.other) == ((), ""), (option, complete)
        # The table knows nearly every tensor: not the few that some models of the family do not have.
        assert complete.required > 0.8 * len(shapes) or part.name == "sd3"
        if option != "clip_l":  # the tiny CLIP-L has the names of CLIP-G, and no width that tells them apart
            assert parts.recognize(shapes) == part.title
        for lost in sorted(shapes)[:: max(len(shapes) // 5, 1)]:
            rest = {tensor: shape for tensor, shape in shapes.items() if tensor != lost}
            incomplete = parts.contents(rest, part)
            assert incomplete.missing in ((lost,), ()), lost
            assert incomplete.is_recognized


def test_all_problems_of_the_files_of_a_run_are_reported_together(checkout, call, models, images, tmp_path):
    from safetensors.torch import load_file, save_file

    files = models("flux").files
    incomplete = tmp_path / "incomplete.safetensors"
    weights = load_file(files[MODEL])
    del weights["single_blocks.1.linear1.weight"], weights["img_in.bias"]
    save_file(weights, incomplete)
    wrong = {MODEL: incomplete, "clip_l": files["t5xxl"], "t5xxl": files["clip_l"], "ae": files[MODEL]}
    usual = arguments.training_arguments("flux_train_network.py", models("flux"), images, tmp_path / "out")
    words = list(usual)
    for option, file in wrong.items():
        words[words.index(f"--{option}") + 1] = str(file)
    options = ("--blocks_to_swap", "500", "--sample_every_n_steps", "2", "--logging_dir", str(incomplete))
    process = call("-m", "kohya_ext", "check", "--sd-scripts", checkout.path, "flux_train_network.py", *words, *options)
    assert process.returncode == 2, process.stderr[-4000:]
    for expected in (
        "is incomplete: 2 of 120 tensors of FLUX are missing (img_in.bias, single_blocks.1.linear1.weight)",
        "--blocks_to_swap 500 is too large for incomplete.safetensors; use at most 2",
        "clip_l.safetensors is CLIP-L, but the script loads T5-XXL from it",
        "t5xxl.safetensors is T5-XXL, but the script loads CLIP-L from it",
        "flux.safetensors is FLUX, but the script loads FLUX's autoencoder from it",
        "--sample_every_n_steps needs --sample_prompts FILE",
        "incomplete.safetensors is a file",
    ):
        assert expected in process.stderr, process.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", families.BY_NAME)
def test_full_size_models_have_every_tensor_of_the_table(checkout, name):
    command = [sys.executable, str(ROOT / "tools" / "make_tensor_names.py"), "--print_names", name, str(checkout.path)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    names = json.loads(output.splitlines()[-1])
    family = families.BY_NAME[name]
    for option in (MODEL, *family.files):
        tensors = names[Path(family.name if option == MODEL else option).stem]
        if tensors:
            assert parts.contents(dict.fromkeys(tensors, ()), _part(family, option)).missing == ()
