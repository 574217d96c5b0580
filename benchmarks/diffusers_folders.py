"""Full-size SDXL and FLUX in diffusers' layout: configurations, sparse weights (see sparse_checkpoints) and tiny tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import sparse_checkpoints
from kohya_ext.tiny import tokenizers

#: CLIP-L and OpenCLIP bigG, which have 77 positions and 49408 tokens in both families.
_CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "projection_dim": 768,
}  # fmt: skip
_CLIP_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20, "projection_dim": 1280,
    "hidden_act": "gelu",
}  # fmt: skip
_T5_XXL = {
    "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip

_VAE = {
    "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 1024,
    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
}  # fmt: skip
_SDXL_VAE = _VAE | {"latent_channels": 4, "scaling_factor": 0.13025}
_FLUX_VAE = _VAE | {
    "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip

_SDXL_UNET = {
    "sample_size": 128, "cross_attention_dim": 2048, "block_out_channels": (320, 640, 1280), "layers_per_block": 2,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
}  # fmt: skip
#: FLUX.1 schnell is the default of diffusers' class; dev has an embedding of the guidance scale, too.
_FLUX_TRANSFORMER = {"num_layers": 19, "num_single_layers": 38, "guidance_embeds": True}


def sdxl(folder: Path) -> None:
    """Write SDXL base 1.0 to ``folder``."""
    import diffusers
    import transformers

    _write_text_encoder(folder / "text_encoder", transformers.CLIPTextModel, transformers.CLIPTextConfig(**_CLIP_L))
    large = transformers.CLIPTextConfig(**_CLIP_G)
    _write_text_encoder(folder / "text_encoder_2", transformers.CLIPTextModelWithProjection, large)
    _write_diffusers(folder / "vae", diffusers.AutoencoderKL, _SDXL_VAE)
    _write_diffusers(folder / "unet", diffusers.UNet2DConditionModel, _SDXL_UNET)
    schedule = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    diffusers.DDPMScheduler(**schedule).save_config(folder / "scheduler")
    _write_tokenizers(folder, tokenizers.CLIP_L, tokenizers.CLIP_G)
    _write_index(folder, "StableDiffusionXLPipeline")


def flux(folder: Path) -> None:
    """Write FLUX.1 dev to ``folder``."""
    import diffusers
    import transformers

    _write_text_encoder(folder / "text_encoder", transformers.CLIPTextModel, transformers.CLIPTextConfig(**_CLIP_L))
    _write_text_encoder(folder / "text_encoder_2", transformers.T5EncoderModel, transformers.T5Config(**_T5_XXL))
    _write_diffusers(folder / "vae", diffusers.AutoencoderKL, _FLUX_VAE)
    _write_diffusers(folder / "transformer", diffusers.FluxTransformer2DModel, _FLUX_TRANSFORMER)
    schedule = {"shift": 3.0, "use_dynamic_shifting": True}
    diffusers.FlowMatchEulerDiscreteScheduler(**schedule).save_config(folder / "scheduler")
    _write_tokenizers(folder, tokenizers.CLIP_L, tokenizers.T5)
    _write_index(folder, "FluxPipeline")


WRITERS: Mapping[str, Callable[[Path], None]] = {"sdxl": sdxl, "flux": flux}


def _write_diffusers(folder: Path, model: Any, settings: Mapping[str, Any]) -> None:
    with torch.device("meta"):
        built = model(**settings)
    built.save_config(folder)
    _write_weights(folder / "diffusion_pytorch_model.safetensors", built)


def _write_text_encoder(folder: Path, model: Any, config: Any) -> None:
    with torch.device("meta"):
        built = model(config)
    built.config.architectures = [model.__name__]
    built.config.save_pretrained(folder)
    _write_weights(folder / "model.safetensors", built)


def _write_weights(file: Path, model: torch.nn.Module) -> None:
    sparse_checkpoints.write_file(file, model.state_dict(), metadata={"format": "pt"})


def _write_tokenizers(folder: Path, *models: str) -> None:
    cache = folder / "tokenizers"
    tokenizers.write(cache)
    for name, model in zip(("tokenizer", "tokenizer_2"), models, strict=True):
        shutil.copytree(cache / model.replace("/", "_"), folder / name, dirs_exist_ok=True)


def _write_index(folder: Path, pipeline: str) -> None:
    """Write the list of a folder's models with their libraries and classes."""
    index: dict[str, Any] = {"_class_name": pipeline}
    for file in sorted(folder.glob("*/*config.json")):
        config = json.loads(file.read_text(encoding="utf-8"))
        name = config.get("_class_name") or config.get("tokenizer_class") or config["architectures"][0]
        index[file.parent.name] = ["diffusers" if "_class_name" in config else "transformers", name]
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
