"""Random weights for the shrunk architectures, written with sd-scripts' classes and converters.

Use it only in `python -m kohya_ext.tiny`: it adds a checkout to `sys.path` and shrinks the models for the whole process.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kohya_ext.tiny import shrink

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")
safetensors: Any = importlib.import_module("safetensors.torch")

_SD3_DEPTH = 2
_SD3_GRID = 32  # latents of up to 64x64, images of up to 512x512 pixels


def write(family: str, checkout: Path, files: dict[str, Path]) -> None:
    """Write `files` (option of the training script -> path) in float32. Raises KeyError for an unknown family."""
    sys.path.insert(0, str(checkout))
    shrink.install()
    with torch.no_grad():
        WRITERS[family](files)


def _write_sdxl(files: dict[str, Path]) -> None:
    library = importlib.import_module("library.sdxl_model_util")
    unet = importlib.import_module("library.sdxl_original_unet").SdxlUNet2DConditionModel()
    library.save_stable_diffusion_checkpoint(
        str(files["pretrained_model_name_or_path"]),
        _randomized(_clip_l(library), 1),
        _randomized(_clip_g(library), 2),
        _randomized(unet, 3),
        epochs=0,
        steps=0,
        ckpt_info=None,
        vae=_randomized(_vae(), 4),
        logit_scale=torch.tensor(4.6),
        metadata={"format": "pt"},
    )


def _write_sd15(files: dict[str, Path]) -> None:
    library = importlib.import_module("library.model_util")
    config = library.create_unet_diffusers_config(v2=False)
    library.save_stable_diffusion_checkpoint(
        v2=False,
        output_file=str(files["pretrained_model_name_or_path"]),
        text_encoder=_randomized(_clip_l(library), 1),
        unet=_randomized(library.UNet2DConditionModel(**config), 3),
        ckpt_path=None,
        epochs=0,
        steps=0,
        metadata={"format": "pt"},
        vae=_randomized(_vae(), 4),
    )


def _write_flux(files: dict[str, Path]) -> None:
    models = importlib.import_module("library.flux_models")
    _save(models.Flux(models.configs["dev"].params), 3, files["pretrained_model_name_or_path"])
    _save(models.AutoEncoder(models.configs["dev"].ae_params), 4, files["ae"])
    _save(_flux_clip_l(), 1, files["clip_l"])
    _save(_t5(), 2, files["t5xxl"])


def _write_chroma(files: dict[str, Path]) -> None:
    models = importlib.import_module("library.flux_models")
    chroma = importlib.import_module("library.chroma_models")
    _save(chroma.Chroma(chroma.chroma_params), 3, files["pretrained_model_name_or_path"])
    _save(models.AutoEncoder(models.configs["dev"].ae_params), 4, files["ae"])
    _save(_t5(), 2, files["t5xxl"])


def _write_lumina(files: dict[str, Path]) -> None:
    models = importlib.import_module("library.lumina_models")
    autoencoders = importlib.import_module("library.flux_models")
    config = importlib.import_module("library.lumina_util").Gemma2Config()
    _save(models.NextDiT_2B_GQA_patch2_Adaln_Refiner(), 3, files["pretrained_model_name_or_path"])
    _save(autoencoders.AutoEncoder(autoencoders.configs["schnell"].ae_params), 4, files["ae"])
    _save(transformers.Gemma2Model(config), 1, files["gemma2"])


def _write_anima(files: dict[str, Path]) -> None:
    models = importlib.import_module("library.anima_models")
    vae = importlib.import_module("library.qwen_image_autoencoder_kl")
    importlib.import_module("library.anima_utils")
    checkout = Path(str(models.__file__)).parents[1]
    qwen3 = transformers.Qwen3Config.from_pretrained(checkout / "configs" / "qwen3_06b", local_files_only=True)
    sizes = {"max_img_h": 512, "max_img_w": 512, "max_frames": 128, "in_channels": 16, "out_channels": 16}
    patches = {"patch_spatial": 2, "patch_temporal": 1}
    rope = {"pos_emb_cls": "rope3d", "rope_enable_fps_modulation": False}
    model = models.Anima(**sizes, **patches, **rope, use_adaln_lora=True, use_llm_adapter=True)
    _save(model, 3, files["pretrained_model_name_or_path"])
    _save(vae.AutoencoderKLQwenImage(), 4, files["vae"])
    _save(transformers.Qwen3Model(qwen3), 1, files["qwen3"])


def _write_hunyuan(files: dict[str, Path]) -> None:
    models = importlib.import_module("library.hunyuan_image_models")
    vae = importlib.import_module("library.hunyuan_image_vae")
    library = importlib.import_module("library.hunyuan_image_text_encoder")
    _save(models.HYImageDiffusionTransformer(), 3, files["pretrained_model_name_or_path"])
    _save(vae.HunyuanVAE2D(), 4, files["vae"])
    sizes = {"rope_scaling": {"rope_type": "default"}, "text_config": {}, "vision_config": {}}
    qwen_vl = transformers.Qwen2_5_VLForConditionalGeneration(library.Qwen2_5_VLConfig(**sizes, tie_word_embeddings=False))
    # sd-scripts renames the tensors of its files to the current names of transformers; undo that here.
    _save(qwen_vl, 1, files["text_encoder"], {"model.language_model.": "model.", "model.visual.": "visual."})
    colours, fonts = json.loads(library.COLOR_IDX_JSON), json.loads(library.MULTILINGUAL_10_LANG_IDX_JSON)
    config = library.T5Config(d_model=1472, feed_forward_proj="gated-gelu", vocab_size=384 + len(colours) + len(fonts))
    _save(transformers.T5EncoderModel(config).encoder, 2, files["byt5"], {"embed_tokens.": "shared."})


def _write_sd3(files: dict[str, Path]) -> None:
    models = importlib.import_module("library.sd3_models")
    library = importlib.import_module("library.sd3_utils")
    params = models.SD3Params(
        patch_size=2,
        depth=_SD3_DEPTH,
        num_patches=_SD3_GRID**2,
        pos_embed_max_size=_SD3_GRID,
        adm_in_channels=shrink.CLIP_L_WIDTH + shrink.CLIP_G_WIDTH,
        qk_norm="rms",
        x_block_self_attn_layers=[],
        context_embedder_in_features=shrink.REAL_T5_WIDTH,
        context_embedder_out_features=64 * _SD3_DEPTH,
        model_type="5-large",
    )
    tensors = {
        prefix + name: tensor
        for prefix, module in (
            ("model.diffusion_model.", _randomized(models.create_sd3_mmdit(params), 3)),
            ("first_stage_model.", _randomized(models.SDVAE(), 4)),
        )
        for name, tensor in module.state_dict().items()
    }
    safetensors.save_file(tensors, files["pretrained_model_name_or_path"])
    clip_l = library.CLIPTextConfig(hidden_size=shrink.REAL_CLIP_L_WIDTH)
    _save(transformers.CLIPTextModelWithProjection(clip_l), 1, files["clip_l"])
    _save(_clip_g(library), 2, files["clip_g"])
    _save(_t5(), 5, files["t5xxl"])


#: Family -> the function that writes its tiny model.
WRITERS: dict[str, Callable[[dict[str, Path]], None]] = {
    "sdxl": _write_sdxl,
    "sd15": _write_sd15,
    "flux": _write_flux,
    "chroma": _write_chroma,
    "lumina": _write_lumina,
    "anima": _write_anima,
    "hunyuan-image": _write_hunyuan,
    "sd3": _write_sd3,
}


def _clip_l(library: Any) -> Any:
    return _clip_text_model(library.CLIPTextConfig(hidden_size=shrink.REAL_CLIP_L_WIDTH))


def _clip_text_model(config: Any) -> Any:
    """Return a CLIP text model whose tensors have the names that are in checkpoints.

    transformers 5.6 removed the submodule ``text_model``, and with it the prefix of all names.
    """
    model = transformers.CLIPTextModel(config)
    return model if hasattr(model, "text_model") else torch.nn.ModuleDict({"text_model": model})


def _clip_g(library: Any) -> Any:
    return transformers.CLIPTextModelWithProjection(library.CLIPTextConfig(hidden_size=shrink.REAL_CLIP_G_WIDTH))


def _flux_clip_l() -> Any:
    library = importlib.import_module("library.flux_utils")
    # Fields that a text model needs, but that have no default in CLIPConfig, which FLUX's loader uses.
    text = {"max_position_embeddings": 77, "hidden_act": "quick_gelu", "attention_dropout": 0.0, "layer_norm_eps": 1e-5}
    return _clip_text_model(library.CLIPConfig(hidden_size=shrink.REAL_CLIP_L_WIDTH, **text, eos_token_id=2))


def _t5() -> Any:
    library = importlib.import_module("library.flux_utils")
    return transformers.T5EncoderModel(library.T5Config(feed_forward_proj="gated-gelu"))


def _vae() -> Any:
    config = importlib.import_module("library.model_util").create_vae_diffusers_config()
    return importlib.import_module("diffusers").AutoencoderKL(**config)


def _save(module: Any, seed: int, path: Path, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write `module` with random weights. `renamed` maps prefixes of tensor names to those in the file."""

    def name_in_file(name: str) -> str:
        return next((new + name[len(old) :] for old, new in renamed.items() if name.startswith(old)), name)

    # Clone, because safetensors rejects shared memory, and T5 has two names for its embedding.
    tensors = {name_in_file(name): tensor.clone() for name, tensor in _randomized(module, seed).state_dict().items()}
    safetensors.save_file(tensors, path)


def _randomized(module: Any, seed: int) -> Any:
    """Return `module` with random parameters and buffers.

    The module's own initialization is unsuitable: layers that start at zero block all gradients before them, so a training
    test would prove nothing. Tensors are set in the order of their names, at scales that preserve the size of
    activations: 1 / sqrt(fan-in) for matrices and kernels, about 1 for norms, about 0 for biases.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(module.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise / tensor[0].numel() ** 0.5)
        else:
            tensor.copy_(0.02 * noise + (0.0 if name.endswith("bias") else 1.0))
    return module
