"""--sample_multipliers with the real scripts: the file is unchanged, multiplier 0 is the base model, the report shows them."""

import numpy
import pytest

from kohya_ext.tiny.arguments import OUTPUT_NAME

torch = pytest.importorskip("torch")
image = pytest.importorskip("PIL.Image")

SDXL, FLUX = "sdxl_train_network.py", "flux_train_network.py"
# Upstream cannot sample the tiny models of HunyuanImage (its VAE gets latents in bf16) and Lumina (Gemma is not a list).
OTHERS = ("train_network.py", "sd3_train_network.py", "anima_train_network.py")

#: Large enough to change the pixels of a sample.
STRONG = ("--learning_rate", "0.5")


def prompts(folder):
    file = folder / "prompts.txt"
    file.write_text("a cat --w 64 --h 64 --s 2 --d 1\n", encoding="utf-8")
    return str(file)


def pixels(folder, multiplier):
    (file,) = (folder / "sample").glob(f"{OUTPUT_NAME}-multiplier-{multiplier}_*.png")
    return numpy.asarray(image.open(file))


@pytest.mark.parametrize("script", [SDXL, *(pytest.param(script, marks=pytest.mark.slow) for script in (FLUX, *OTHERS))])
def test_zero_is_the_base_model_and_the_file_is_unchanged(checkout, train, tmp_path, script):
    given = (*STRONG, "--sample_prompts", prompts(tmp_path))
    run = train(checkout, script, *given, "--sample_at_first", "--sample_multipliers", "0,0.5,1")
    assert run.code == 0, run.output[-4000:]
    other = train(checkout, script, *given, "--sample_at_first", "--disable_patch", "sample_multipliers")
    assert run.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in other.tensors.items())
    (first,) = (run.folder / "sample").glob(f"{OUTPUT_NAME}_*.png")
    off, half, full = (pixels(run.folder, multiplier) for multiplier in ("0", "0.5", "1"))
    assert (off == numpy.asarray(image.open(first))).all(), "without the LoRA it is not the base model's sample"
    assert (off != half).any()
    assert (half != full).any()
