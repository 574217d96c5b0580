"""One block of each kind that the families' models repeat, from sd-scripts' own classes at full width.

To add a block, add a row to :data:`CASES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, int]
"""Rows and columns."""

#: Image and text tokens. HunyuanImage and Anima need a number of image tokens that a square has.
IMAGE, TEXT = 256, 64


@dataclass(frozen=True)
class Case:
    """A block, and how its model calls it."""

    family: str
    title: str
    """The kind of block, where a family has several, and its width."""
    module: str
    """The module of the block's class."""
    build: Callable[[Any], Any]
    """The module -> the block."""
    streams: tuple[Shape, ...]
    """The hidden states that the block changes."""
    call: Callable[..., Any]
    """The block, its streams, contexts and conditions, each [1, rows, columns] -> the changed streams."""
    contexts: tuple[Shape, ...] = ()
    """The text that the block attends to and does not change."""
    conditions: tuple[Shape, ...] = ()
    """The embeddings of the time step."""

    @property
    def name(self) -> str:
        """The block's name in results."""
        return f"{self.family} {self.title}"

    def block(self) -> torch.nn.Module:
        """Return the block with sd-scripts' own initialization. The checkout must be importable."""
        block: torch.nn.Module = self.build(importlib.import_module(self.module))
        return block


def _angles(tokens: int, size: int) -> torch.Tensor:
    """Return the angles of rotary embeddings, [tokens, size / 2], for positions along one axis."""
    return torch.outer(torch.arange(tokens).float(), 10000.0 ** -torch.linspace(0, 1, size // 2))


def _flux_rotary(tokens: int) -> torch.Tensor:
    angles = _angles(tokens, 128)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((cos, -sin, sin, cos), -1).view(1, 1, tokens, 64, 2, 2)


def _chroma_single(block: Any, x: Any, rows: Any) -> Any:
    # Chroma's blocks receive the modulations that FLUX's compute.
    modulation = importlib.import_module("library.chroma_models").ModulationOut(*(0.5 * rows).split(1, 1))
    return block(x, _flux_rotary(IMAGE + TEXT), modulation, torch.tensor([TEXT]))


def _lumina(block: Any, x: Any, time: Any) -> Any:
    angles = _angles(x.shape[1], 96)[None]
    return block(x, torch.ones(x.shape[:2], dtype=torch.bool), torch.polar(torch.ones_like(angles), angles), time[:, 0])


def _attention_parameters(image: int | None = None) -> Any:
    kind = importlib.import_module("library.attention").AttentionParams
    return kind("torch", False, image)


def _hunyuan(block: Any, *streams: Any) -> Any:
    *states, time = streams
    angles = _angles(IMAGE, 128).repeat_interleave(2, 1)
    return block(*states, time[:, 0], (angles.cos(), angles.sin()), _attention_parameters(IMAGE))


def _anima(block: Any, x: Any, text: Any, time: Any, modulation: Any) -> Any:
    angles = _angles(IMAGE, 128).repeat(1, 2)[:, None, None]
    side = int(IMAGE**0.5)
    image = x.view(1, 1, side, side, -1)
    out = block(image, time, text, _attention_parameters(), rope_emb_L_1_1_D=angles, adaln_lora_B_T_3D=0.5 * modulation)
    return out.view(x.shape)


def _unet(family: str, module: str, width: int, heads: int, context: int) -> Case:
    def build(models: Any) -> Any:
        block = models.BasicTransformerBlock(width, heads, width // heads, context)
        block.set_use_sdpa(True)
        return block

    return Case(
        family=family,
        title=str(width),
        module=module,
        build=build,
        streams=((IMAGE, width),),
        contexts=((77, context),),
        call=lambda block, x, text: block(x, text),
    )


CASES: tuple[Case, ...] = (
    *(_unet("sd15", "library.original_unet", width, 8, 768) for width in (320, 640, 1280)),
    *(_unet("sdxl", "library.sdxl_original_unet", width, width // 64, 2048) for width in (640, 1280)),
    Case(
        family="sd3",
        title="joint 1536",
        module="library.sd3_models",
        build=lambda models: models.MMDiTBlock(
            *(1536, 24), attn_mode="torch", qkv_bias=True, qk_norm="rms", pre_only=False, x_block_self_attn=False
        ),
        streams=((TEXT, 1536), (IMAGE, 1536)),
        conditions=((1, 1536),),
        call=lambda block, text, image, time: block(text, image, time[:, 0]),
    ),
    Case(
        family="lumina",
        title="2304",
        module="library.lumina_models",
        build=lambda models: models.JointTransformerBlock(0, 2304, 24, 8, 256, None, 1e-5, True),
        streams=((IMAGE + TEXT, 2304),),
        conditions=((1, 1024),),
        call=_lumina,
    ),
    Case(
        family="anima",
        title="2048",
        module="library.anima_models",
        build=lambda models: models.Block(2048, 1024, 16, use_adaln_lora=True, adaln_lora_dim=256),
        streams=((IMAGE, 2048),),
        contexts=((TEXT, 1024),),
        conditions=((1, 2048), (1, 3 * 2048)),
        call=_anima,
    ),
    Case(
        family="flux",
        title="double 3072",
        module="library.flux_models",
        build=lambda models: models.DoubleStreamBlock(3072, 24, 4.0, qkv_bias=True),
        streams=((IMAGE, 3072), (TEXT, 3072)),
        conditions=((1, 3072),),
        call=lambda block, image, text, time: block(image, text, time[:, 0], _flux_rotary(IMAGE + TEXT)),
    ),
    Case(
        family="flux",
        title="single 3072",
        module="library.flux_models",
        build=lambda models: models.SingleStreamBlock(3072, 24, 4.0),
        streams=((IMAGE + TEXT, 3072),),
        conditions=((1, 3072),),
        call=lambda block, x, time: block(x, time[:, 0], _flux_rotary(IMAGE + TEXT)),
    ),
    # Its double block differs from FLUX's in the same way: modulations are inputs.
    Case(
        family="chroma",
        title="single 3072",
        module="library.chroma_models",
        build=lambda models: models.SingleStreamBlock(3072, 24, 4.0),
        streams=((IMAGE + TEXT, 3072),),
        conditions=((3, 3072),),
        call=_chroma_single,
    ),
    Case(
        family="hunyuan-image",
        title="double 3584",
        module="library.hunyuan_image_modules",
        build=lambda models: models.MMDoubleStreamBlock(3584, 28, 4.0, qkv_bias=True),
        streams=((IMAGE, 3584), (TEXT, 3584)),
        conditions=((1, 3584),),
        call=_hunyuan,
    ),
    Case(
        family="hunyuan-image",
        title="single 3584",
        module="library.hunyuan_image_modules",
        build=lambda models: models.MMSingleStreamBlock(3584, 28, 4.0),
        streams=((IMAGE + TEXT, 3584),),
        conditions=((1, 3584),),
        call=_hunyuan,
    ),
)
