"""Gradients of the real classes under every kind of checkpointing, as JSON: ``checkpointing.py CHECKOUT CASE...``.

Prints, for each case: how many gradients there are without checkpointing, and for checkpointing with the patches and without
them (upstream's own kind) either the error or the number of gradients that are missing and that differ in any bit. Upstream's
workarounds (``requires_grad_`` on latents and embeddings) are left out on purpose: they hide what reentrant checkpointing
loses.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kohya_ext.config.settings import Settings
from kohya_ext.patching.patch import Patcher, registry
from kohya_ext.sdscripts.checkouts import describe
from kohya_ext.tiny import shrink, vocabulary

PATCH = "nonreentrant_checkpointing"
checkout = describe(Path(sys.argv[1]), "named")
sys.path.insert(0, str(checkout.path))
shrink.install()

import torch  # noqa: E402
from library import sdxl_model_util, sdxl_original_unet  # noqa: E402
from transformers import CLIPTextModel  # noqa: E402

Build = Callable[[], tuple[torch.nn.Module, Callable[[], torch.Tensor]]]
CONTEXT = shrink.CLIP_L_WIDTH + shrink.CLIP_G_WIDTH
ADDED = shrink.CLIP_G_WIDTH + 6 * 256


def unet_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(2)
    return torch.randn(2, 4, 16, 16), torch.tensor([17, 801]), torch.randn(2, 77, CONTEXT), torch.randn(2, ADDED)


def wake(module: torch.nn.Module) -> torch.nn.Module:
    """Randomize every zero-initialized weight. It makes all gradients before it zero, which hides lost ones."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        if not parameter.any():
            parameter.data.normal_(0, 0.05, generator=generator)
    return module


def lora(**kwargs: str) -> Build:
    """An adapter on a frozen U-Net, as train_network.py composes them."""

    def build() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        from networks import lora as networks_lora

        unet = wake(sdxl_original_unet.SdxlUNet2DConditionModel()).requires_grad_(False)
        network = networks_lora.create_network(1.0, 4, 1.0, None, [], unet, **kwargs)
        network.apply_to([], unet, False, True)
        wake(network)
        unet.add_module("adapter", network)
        unet.train()
        inputs = unet_inputs()
        return unet, lambda: unet(*inputs)

    return build


def lllite() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    from networks import control_net_lllite_for_train as training

    training.replace_unet_linear_and_conv2d()
    unet = training.SdxlUNet2DConditionModelControlNetLLLite()
    wake(unet)
    unet.apply_lllite(8, 8, None)
    wake(unet)
    # prepare_params leaves an unused base weight trainable, which is another workaround. Freeze the whole base here.
    trainable = {id(parameter) for parameter in unet.get_trainable_params()}
    for parameter in unet.parameters():
        parameter.requires_grad_(id(parameter) in trainable)
    unet.train()
    inputs, image = unet_inputs(), torch.rand(2, 3, 128, 128)
    return unet, lambda: unet(*inputs, cond_image=image)


def control_net() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    from library import sdxl_original_control_net as library_control_net

    net = wake(library_control_net.SdxlControlNet())
    controlled = wake(library_control_net.SdxlControlledUNet()).requires_grad_(False)
    net.add_module("controlled", controlled)
    net.train()
    inputs, image = unet_inputs(), torch.rand(2, 3, 128, 128)
    return net, lambda: controlled(*inputs, *net(*inputs, cond_image=image))


def text_encoder(train_embeddings: bool) -> Build:
    """CLIP-L with a LoRA and frozen, so that no input of its layers requires grad, or with trained embeddings."""

    def build() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
        from networks import lora as networks_lora

        config = sdxl_model_util.CLIPTextConfig(hidden_size=768, hidden_act="quick_gelu", max_position_embeddings=77)
        encoder = CLIPTextModel._from_config(config).requires_grad_(False)
        if train_embeddings:
            encoder.get_input_embeddings().requires_grad_(True)
        else:
            unet = sdxl_original_unet.SdxlUNet2DConditionModel()
            network = networks_lora.create_network(1.0, 4, 1.0, None, [encoder], unet)
            network.apply_to([encoder], unet, True, False)
            encoder.add_module("adapter", torch.nn.ModuleList(wake(network).text_encoder_loras))
        encoder.train()
        tokens = torch.randint(len(vocabulary.CLIP), (2, 77), generator=torch.Generator().manual_seed(4))
        return encoder, lambda: encoder(tokens).last_hidden_state

    return build


def distributed() -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """The LoRA case in DistributedDataParallel with find_unused_parameters, in a group of one process."""
    module, _ = lora()()
    if not torch.distributed.is_initialized():
        file = tempfile.mktemp()
        torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    parallel = torch.nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    inputs = unet_inputs()
    # Reentrant checkpointing fails for another reason if no input requires grad.
    inputs[0].requires_grad_()
    return module, lambda: parallel(*inputs)


CASES: dict[str, Build] = {
    "lora": lora(),
    "locon": lora(conv_dim="4", conv_alpha="1"),
    "lllite": lllite,
    "control_net": control_net,
    "text_encoder_lora": text_encoder(train_embeddings=False),
    "textual_inversion": text_encoder(train_embeddings=True),
    "distributed": distributed,
}


def gradients(build: Build, checkpointing: bool) -> dict[str, torch.Tensor | None]:
    torch.manual_seed(1)
    module, forward = build()
    if checkpointing:
        for part in module.modules():
            # sd-scripts' U-Nets have the first method, and transformers' models the second.
            for name in ("enable_gradient_checkpointing", "gradient_checkpointing_enable"):
                if callable(enable := getattr(part, name, None)) and part is not getattr(module, "adapter", None):
                    enable()
    forward().square().mean().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.requires_grad}


def compare(build: Build, expected: dict[str, torch.Tensor | None]) -> dict[str, object]:
    try:
        actual = gradients(build, checkpointing=True)
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    missing = [name for name, gradient in expected.items() if gradient is not None and actual[name] is None]
    there = [name for name in expected if expected[name] is not None and actual[name] is not None]
    return {
        "missing": len(missing),
        "different": sum(not torch.equal(expected[name], actual[name]) for name in there),
    }


@contextmanager
def patched() -> Iterator[None]:
    patcher = Patcher({PATCH: registry()[PATCH]}, Settings(), checkout)
    patcher.arm()
    assert all(outcome.status == "applied" for outcome in patcher.outcomes.values()), patcher.outcomes
    yield
    patcher.undo()


def examine(build: Build) -> dict[str, object]:
    expected = gradients(build, checkpointing=False)
    with patched():
        ours = compare(build, expected)
    count = sum(gradient is not None for gradient in expected.values())
    return {"gradients": count, "patched": ours, "upstream": compare(build, expected)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # LLLite runs last, because it replaces torch.nn.Linear for the rest of the process.
    names = sorted(sys.argv[2:], key=lambda name: name == "lllite")
    print("RESULT " + json.dumps({name: examine(CASES[name]) for name in names}))
