"""The models of each family at full size, and a batch for them, without weights: called under FakeTensorMode.

Sizes come from sd-scripts' own modules wherever it has them as data; where it writes them into a loader that wants a file
(the CLIP text encoders), they are said again here and the loader is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kohya_ext.vram.choices import Choices

CLIP_TOKENS = 77


@dataclass
class Models:
    """One family's models and what its training step is fed."""

    unet: Any
    """The U-Net or DiT."""
    text_encoders: list[Any]
    vae: Any
    latents: tuple[int, int]
    """Channels, and pixels per latent along a side."""
    token_ids: Callable[[int], list[torch.Tensor]]
    """Batch size -> what the dataset hands out for captions that are not cached."""
    conditions: Callable[[int], list[torch.Tensor]]
    """Batch size -> what it hands out for cached text encoder outputs."""
    tokenizers: Any
    """What the encoding strategy asks its tokenizers for: sizes, no vocabulary."""
    extras: Callable[[int], dict[str, torch.Tensor]] = field(default=lambda batch: {})
    """Batch size -> whatever else this family's step reads from a batch."""


def build(family: str, choices: Choices) -> Models:
    """Build a family's models. Raises KeyError for a family that is not in :data:`BUILDERS`."""
    return BUILDERS[family](choices)


def attend(unet: Any, choices: Choices) -> None:
    """Choose the U-Net's attention. xformers saves what PyTorch's own does, and need not be installed here."""
    if choices.mem_eff_attn:
        unet.set_use_memory_efficient_attention(False, True)
    elif choices.xformers or choices.sdpa:
        unet.set_use_sdpa(True)


def _clip(module: Any, **sizes: Any) -> Any:
    """A CLIP configuration, through the name that the family's loader uses."""
    return module.CLIPTextConfig(
        vocab_size=49408, max_position_embeddings=CLIP_TOKENS, layer_norm_eps=1e-05, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, **sizes,
    )  # fmt: skip


def _clip_tokenizer() -> Any:
    return SimpleNamespace(model_max_length=CLIP_TOKENS, eos_token_id=2)


def _clip_ids(batch: int, choices: Choices) -> torch.Tensor:
    return torch.zeros(batch, (choices.max_token_length or 75) // 75, CLIP_TOKENS, dtype=torch.long)


def _clip_length(choices: Choices) -> int:
    """Tokens in a caption's embedding: several chunks of 77 lose their inner ends."""
    return CLIP_TOKENS if choices.max_token_length is None else choices.max_token_length + 2


def _sdxl(choices: Choices) -> Models:
    unets = importlib.import_module("library.sdxl_original_unet")
    util = importlib.import_module("library.sdxl_model_util")
    transformers = importlib.import_module("transformers")
    unet = unets.SdxlUNet2DConditionModel(in_channels=9 if choices.train_inpainting else 4)
    attend(unet, choices)
    # sdxl_model_util.load_models_from_sdxl_checkpoint
    small = _clip(util, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                  hidden_act="quick_gelu", projection_dim=768)  # fmt: skip
    large = _clip(util, hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20,
                  hidden_act="gelu", projection_dim=1280)  # fmt: skip
    length, widths = _clip_length(choices), (small.hidden_size, large.hidden_size)

    return Models(
        unet=unet,
        text_encoders=[transformers.CLIPTextModel._from_config(small), transformers.CLIPTextModelWithProjection(large)],
        vae=_sd_vae(),
        latents=(4, 8),
        token_ids=lambda batch: [_clip_ids(batch, choices)] * 2,
        conditions=lambda batch: [
            *(torch.zeros(batch, length, width) for width in widths),
            torch.zeros(batch, large.projection_dim),
        ],
        tokenizers=SimpleNamespace(tokenizer1=_clip_tokenizer(), tokenizer2=_clip_tokenizer()),
        extras=lambda batch: {
            name: torch.zeros(batch, 2, dtype=torch.long) for name in ("original_sizes_hw", "crop_top_lefts", "target_sizes_hw")
        },
    )


def _sd15(choices: Choices) -> Models:
    unets = importlib.import_module("library.original_unet")
    util = importlib.import_module("library.model_util")
    transformers = importlib.import_module("transformers")
    sizes = util.create_unet_diffusers_config(choices.v2, True)
    unet = unets.UNet2DConditionModel(**sizes)
    attend(unet, choices)
    # model_util.load_models_from_stable_diffusion_checkpoint
    clip = (
        _clip(util, hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16,
              hidden_act="gelu", projection_dim=512)
        if choices.v2
        else _clip(util, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
                   hidden_act="quick_gelu", projection_dim=768)
    )  # fmt: skip
    length = _clip_length(choices)
    return Models(
        unet=unet,
        text_encoders=[transformers.CLIPTextModel._from_config(clip)],
        vae=_sd_vae(),
        latents=(4, 8),
        token_ids=lambda batch: [_clip_ids(batch, choices)],
        conditions=lambda batch: [torch.zeros(batch, length, clip.hidden_size)],
        tokenizers=SimpleNamespace(tokenizer=_clip_tokenizer()),
    )


def _sd_vae() -> Any:
    util = importlib.import_module("library.model_util")
    diffusers = importlib.import_module("diffusers")
    return diffusers.AutoencoderKL(**util.create_vae_diffusers_config())


BUILDERS: dict[str, Callable[[Choices], Models]] = {"sdxl": _sdxl, "sd15": _sd15}


def cast(module: Any, dtype: torch.dtype, skip: Sequence[Any] = ()) -> None:
    """Cast a module's floating-point parameters and buffers, as ``.to(dtype)`` does with tensors that are not fake."""
    for part in module.modules():
        if part in skip:
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                part._parameters[name] = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
