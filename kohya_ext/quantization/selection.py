"""Runs that can have an 8-bit base, and the layers of a model that it includes. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kohya_ext.sdscripts.families import FAMILIES, of

#: Networks that call their layers' forward methods and do not read their weights.
NETWORKS = (
    *("networks.lora", "networks.lora_fa", "networks.lora_flux", "networks.lora_sd3", "networks.lora_lumina"),
    *("networks.lora_anima", "networks.lora_hunyuan_image", "networks.loha", "networks.lokr"),
)

#: Classes of modules whose linear layers are converted, where these are not the family's blocks. A U-Net's transformer
#: includes its projections; its ResNet blocks have linear layers for time embeddings only, with one row per image.
_CLASSES: Mapping[str, tuple[str, ...]] = {"sdxl": ("Transformer2DModel",), "sd15": ("Transformer2DModel",)}


#: Classes of the blocks of text encoders: CLIP, T5, Gemma 2, Qwen 2.5 VL and Qwen 3 of transformers.
_TEXT_CLASSES = ("CLIPEncoderLayer", "T5Block", "Gemma2DecoderLayer", "Qwen2_5_VLDecoderLayer", "Qwen3DecoderLayer")


def layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of the model's frozen linear layers that are kept in 8 bits."""
    family = next((family for family in FAMILIES if family.model == type(model).__name__), None)
    yield from _linear_layers(model, () if family is None else _CLASSES.get(family.name, family.blocks.classes))


def convolutions(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of a U-Net's frozen 3x3 convolutions that can be kept in 8 bits.

    They are those of ResNet blocks and upsamplers; the first and the last one have too few channels.
    """
    from kohya_ext.quantization.convolution import fits

    if any(family.unet and family.model == type(model).__name__ for family in FAMILIES):
        yield from ((name, layer) for name, layer in model.named_modules() if fits(layer))


def text_layers(encoder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the same of a text encoder, without layers in 8 bits."""
    for name, layer in _linear_layers(encoder, _TEXT_CLASSES):
        if layer.weight.itemsize > 1:
            yield name, layer


def includes_text_encoders(args: Any) -> bool:
    """Return whether the text encoders of a LoRA script's run stay on the GPU and are not trained."""
    return getattr(args, "network_train_unet_only", False) and not getattr(args, "cache_text_encoder_outputs", False)


def _linear_layers(model: Any, classes: Collection[str]) -> Iterator[tuple[str, Any]]:
    import torch

    seen: set[Any] = set()  # a block may contain another
    for prefix, module in model.named_modules():
        if type(module).__name__ in classes:
            for name, layer in module.named_modules(seen, prefix):
                if type(layer) is torch.nn.Linear:
                    yield name, layer


def reason_to_refuse_convolutions(precision: str | None, args: Any, script: str | None) -> str | None:
    """Return why a run with this 8-bit base cannot have 8-bit convolutions, and what to do; None if it can."""
    family = of(script or "", vars(args))
    if precision != "int8":
        return "it needs --base_precision int8; add it, or remove the option"
    if family is None or not family.unet:
        return f"the model of {script} has no convolutions for it; remove the option"
    return None


def reason_to_refuse(args: Any, script: str | None) -> str | None:
    """Return why a run with a script's arguments cannot have an 8-bit base, and what to do; None if it can."""
    family = of(script or "", vars(args))
    if family is None or script != family.lora:
        return f"{script} trains the base itself or copies it; remove the option"
    for option in ("fp8_base", "fp8_base_unet", "fp8_scaled"):
        if getattr(args, option, False):
            return f"--{option} changes the base too; remove one of the two"
    network = getattr(args, "network_module", None)
    if str(network) not in NETWORKS:
        return f"{network} may read the base's weights; use one of {', '.join(NETWORKS)}"
    if any(str(each).startswith("ggpo_") for each in getattr(args, "network_args", None) or ()):
        return "GGPO reads the base's weights; remove the network arguments ggpo_sigma and ggpo_beta"
    if getattr(args, "deepspeed", False):
        return "DeepSpeed moves the base's weights itself; remove one of the two"
    return None
