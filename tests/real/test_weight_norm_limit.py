"""`--scale_weight_norms` with all norms read together gives upstream's weights and norms."""

import pytest

torch = pytest.importorskip("torch")

from kohya_ext.patches import weight_norm_limit  # noqa: E402

from kohya_ext.config.settings import Settings  # noqa: E402
from kohya_ext.patching.patch import Patcher  # noqa: E402

LIMIT = 0.5


class Network(torch.nn.Module):
    """Modules as in a LoRA's state, around the limit: linear, 1x1 and 3x3 convolutions."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((), (1, 1), (3, 3))
        for index, strength in enumerate((0.001, 0.05, 0.2, 1.0)):
            for shape in shapes:
                module = torch.nn.Module()
                for name, size in (("down", (4, 6, *shape)), ("up", (8, 4, *(1 for _ in shape)))):
                    weight = strength * torch.randn(size, generator=generator)
                    layer = torch.nn.Module()
                    layer.weight = torch.nn.Parameter(weight.to(dtype))
                    setattr(module, f"lora_{name}", layer)
                module.register_buffer("alpha", torch.tensor(3.0))
                setattr(self, f"lora_unet_{index}_{len(shape)}_{len(shape) and shape[0]}", module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["lora", "lora_fa", "lora_flux", "lora_sd3", "lora_lumina", "lora_anima"])
def test_weights_and_norms_are_bit_identical(checkout, checkout_module, name, dtype):
    module = checkout_module(f"networks.{name}")
    original = module.LoRANetwork.apply_max_norm_regularization
    patcher = Patcher({weight_norm_limit.PATCH.name: weight_norm_limit.PATCH}, Settings(), checkout)
    patcher.arm()
    try:
        replaced = module.LoRANetwork.apply_max_norm_regularization
        assert replaced is not original
        theirs, ours = Network(dtype), Network(dtype)
        expected = original(theirs, LIMIT, torch.device("cpu"))
        assert replaced(ours, LIMIT, torch.device("cpu")) == expected
    finally:
        patcher.undo()
    assert 0 < expected[0] < 12
    for key, weight in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], weight), key


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sdxl_train_network.py", "flux_train_network.py"])
def test_real_script_trains_bit_identically(checkout, train, upstream, script):
    options = ("--scale_weight_norms", "0.001")
    ours = train(checkout, script, *options)
    theirs = train(checkout, script, *options, before=("--disable_patch", "weight_norm_limit"))
    assert ours.report["facts"]["weight_norm_limit"]["steps"] == 4
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name], tensor), name
