"""scaled_checkpoints: real scripts train on 8-bit checkpoint files as on the bf16 files of the same weights."""

import pytest

from kohya_ext.tiny import arguments
from tests import scaled_files

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

MODEL = "pretrained_model_name_or_path"
SDXL, FLUX, SD3, LUMINA = (f"{name}_train_network.py" for name in ("sdxl", "flux", "sd3", "lumina"))
ANIMA, HUNYUAN = "anima_train_network.py", "hunyuan_image_train_network.py"


def _pair(models, folder, script, format_name, options=(MODEL,)):
    files = models(arguments.SCRIPTS[script][0]).files
    return scaled_files.words(files, options, folder, format_name)


@pytest.mark.parametrize(
    ("script", "format_name", "options"),
    [
        (SDXL, "comfy_fp8", [MODEL]),
        (FLUX, "fp8_scaled", [MODEL, "t5xxl"]),
        (LUMINA, "convrot", [MODEL]),
        (ANIMA, "int8_rows", [MODEL]),
        (SD3, "fp8_scaled", [MODEL]),
        (HUNYUAN, "fp8_blocks", [MODEL]),
        ("train_network.py", "fp8_scaled", [MODEL]),
    ],
)
def test_lora_is_that_of_the_bf16_file(checkout, train, models, tmp_path, script, format_name, options):
    stored, usual = _pair(models, tmp_path, script, format_name, options)
    mixed = "no" if script == HUNYUAN else "bf16"  # upstream's HunyuanImage mixes precisions, which a CPU refuses
    run, expected = (train(checkout, script, *words, "--mixed_precision", mixed) for words in (stored, usual))
    assert run.code == expected.code == 0, run.output[-3000:]
    assert run.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in expected.tensors.items())
    assert len(run.report["facts"]["scaled_checkpoints"]["files"]) == len(options)
    assert "with scales" in run.output
    assert "with scales" not in expected.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "format_name"),
    [("sdxl_train.py", "comfy_fp8"), ("flux_train.py", "fp8_scaled"), ("anima_train.py", "int8_rows")],
)
def test_fine_tune_is_that_of_the_bf16_file(checkout, train, models, tmp_path, script, format_name):
    stored, usual = _pair(models, tmp_path, script, format_name)
    run, expected = (train(checkout, script, *words, "--mixed_precision", "bf16") for words in (stored, usual))
    assert run.code == expected.code == 0, run.output[-3000:]
    assert run.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in expected.tensors.items())


@pytest.mark.newest
@pytest.mark.parametrize(
    ("script", "format_name", "precision"),
    [(FLUX, "fp8_scaled", "fp8"), (FLUX, "fp8_scaled", "int8"), (SDXL, "int8_rows", "int8"), (LUMINA, "fp8_blocks", "fp8")],
)
def test_8_bit_base_takes_fp8_weights_as_they_are(checkout, train, models, tmp_path, script, format_name, precision):
    """Other formats are quantized from the weights in bf16, as those of the bf16 file are."""
    stored, usual = _pair(models, tmp_path, script, format_name)
    options = ("--mixed_precision", "bf16", "--base_precision", precision)
    run, expected = (train(checkout, script, *words, *options) for words in (stored, usual))
    facts = run.report["facts"]["base_precision"]
    is_equal = all(torch.equal(tensor, run.tensors[name]) for name, tensor in expected.tensors.items())
    if (format_name, precision) == ("fp8_scaled", "fp8"):
        assert facts["taken"] == facts["layers"] > 0
        assert not is_equal
    else:
        assert facts["taken"] == 0
        assert is_equal
