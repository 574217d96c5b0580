"""unet_precision: the weights of a 16-bit checkpoint train as with upstream's copies in float32."""

import pytest

torch = pytest.importorskip("torch")

LORA = "sdxl_train_network.py"


@pytest.fixture
def checkpoint(models, tmp_path):
    """A tiny SDXL checkpoint in float16."""
    from safetensors.torch import load_file, save_file

    file = tmp_path / "half.safetensors"
    tensors = load_file(models("sdxl").files["pretrained_model_name_or_path"])
    save_file({name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, file)
    return str(file)


@pytest.mark.newest
@pytest.mark.parametrize("precision", ["bf16", pytest.param("no", marks=pytest.mark.slow)])
def test_weights_are_those_of_float32_copies(checkout, train, checkpoint, precision):
    options = ("--pretrained_model_name_or_path", checkpoint, "--mixed_precision", precision)
    run = train(checkout, LORA, *options)
    other = train(checkout, LORA, *options, "--disable_patch", "unet_precision")
    assert run.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, run.tensors[name]) for name, tensor in other.tensors.items())
    assert run.report["facts"]["unet_precision"] == {"dtype": "torch.float16"}


@pytest.mark.slow
def test_merged_base_weights_keep_float32(checkout, train, checkpoint):
    base = train(checkout, LORA)
    options = ("--pretrained_model_name_or_path", checkpoint, "--base_weights", str(base.file))
    run = train(checkout, LORA, *options)
    assert run.code == 0, run.output[-3000:]
    assert run.report["facts"]["unet_precision"] == {}
