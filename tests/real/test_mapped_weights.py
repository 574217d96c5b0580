"""mapped_weights: weights whose casts are postponed train as those that upstream copies."""

import pytest

from kohya_ext.tiny import arguments

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.thorough

SDXL, FLUX, SD3 = "sdxl_train_network.py", "flux_train_network.py", "sd3_train_network.py"


@pytest.fixture
def half(models, tmp_path):
    """Return tiny checkpoints in float16, as (option, file) words."""

    def convert(family, *options):
        from safetensors.torch import load_file, save_file

        words = []
        for option in options:
            file = tmp_path / f"{option}.safetensors"
            tensors = load_file(models(family).files[option])
            save_file({name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, file)
            words += [f"--{option}", str(file)]
        return words

    return convert


MODEL = "pretrained_model_name_or_path"
BF16, FP32, FP8 = "--mixed_precision bf16", "--mixed_precision no", "--mixed_precision bf16 --fp8_base"


@pytest.mark.newest
@pytest.mark.parametrize(
    ("script", "files", "options"),
    [
        (SDXL, [MODEL], BF16),
        (FLUX, [MODEL, "clip_l", "t5xxl"], FP8),
        pytest.param(SDXL, [MODEL], FP32, marks=pytest.mark.slow),
        pytest.param(FLUX, [MODEL, "clip_l", "t5xxl"], BF16, marks=pytest.mark.slow),
        pytest.param(SD3, [MODEL], BF16, marks=pytest.mark.slow),
        pytest.param(SD3, [MODEL], FP8, marks=pytest.mark.slow),
        pytest.param("lumina_train_network.py", [MODEL, "gemma2"], FP8, marks=pytest.mark.slow),
        pytest.param("hunyuan_image_train_network.py", ["text_encoder", "byt5"], FP32, marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_upstreams_copies(checkout, train, half, script, files, options):
    words = (*half(arguments.SCRIPTS[script][0], *files), *options.split())
    run = train(checkout, script, *words)
    other = train(checkout, script, *words, "--disable_patch", "mapped_weights")
    assert run.code == other.code == 0, run.output[-3000:]
    assert run.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in other.tensors.items())
    assert run.report["facts"]["mapped_weights"]["postponed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("script", [SDXL, FLUX])
def test_merged_base_weights_are_upstreams(checkout, train, script):
    base = train(checkout, script)
    options = ("--base_weights", str(base.file), "--mixed_precision", "bf16")
    run, other = (train(checkout, script, *options, *more) for more in ((), ("--disable_patch", "mapped_weights")))
    assert run.code == 0, run.output[-3000:]
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in other.tensors.items())
