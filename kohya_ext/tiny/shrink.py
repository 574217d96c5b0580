"""Shrink the hard-coded architectures of sd-scripts when they are imported.

Class names, layer names and the number of resolutions do not change, so LoRA modules, block weights and checkpoint
conversion work as in a full-size model. Supports Stable Diffusion 1.5, SDXL (with ControlNet), FLUX.1, Chroma, Lumina Image
2.0, SD3, HunyuanImage 2.1 and Anima.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import wrapt

from kohya_ext.tiny import vocabulary

_Arguments = dict[str, Any]

CLIP_L_WIDTH = 32
CLIP_G_WIDTH = 48
T5_WIDTH = 64
GEMMA_WIDTH = 32
QWEN_WIDTH = 16
QWEN_VL_WIDTH = 32
UNET_WIDTH = 16
"""Channels at the first resolution; 320 in real models."""

REAL_T5_WIDTH = 4096
REAL_CLIP_L_WIDTH = 768
REAL_CLIP_G_WIDTH = 1280
_REAL_UNET_WIDTH = 320

UNET_DEPTHS = {2: 1, 10: 2}
"""SDXL's transformer layers at a resolution -> those of the tiny model."""


@functools.cache
def install() -> None:
    """Shrink each architecture when its module is imported, or now if it already is. Repeated calls do nothing."""
    for name, shrink in SHRINKERS.items():
        wrapt.register_post_import_hook(shrink, name)


def _with_overrides(build: Callable[..., Any], overrides: Callable[[_Arguments], _Arguments]) -> Callable[..., Any]:
    """Return `build` with keyword arguments updated by `overrides(kwargs)`."""

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Any:
        return build(*args, **{**kwargs, **overrides(kwargs)})

    return built


def _clip_text(config: _Arguments) -> _Arguments:
    width = config.get("hidden_size")
    if width == REAL_CLIP_L_WIDTH:
        # SDXL reads hidden_states[11] of this text encoder, so it keeps its twelve layers.
        small = {"hidden_size": CLIP_L_WIDTH, "num_hidden_layers": 12}
    elif width == REAL_CLIP_G_WIDTH:
        small = {"hidden_size": CLIP_G_WIDTH, "num_hidden_layers": 3}
    else:
        return {}
    width = small["hidden_size"]
    return small | {
        "vocab_size": len(vocabulary.CLIP),
        "intermediate_size": 2 * width,
        "num_attention_heads": 2,
        "projection_dim": width,
    }


def _t5(config: _Arguments) -> _Arguments:
    return {
        "vocab_size": len(vocabulary.T5),
        "d_model": T5_WIDTH,
        "d_ff": 2 * T5_WIDTH,
        "d_kv": 16,
        "num_heads": 4,
        "num_layers": 2,
        "num_decoder_layers": 2,
    }


def _gemma(config: _Arguments) -> _Arguments:
    return {
        "vocab_size": len(vocabulary.GEMMA),
        "hidden_size": GEMMA_WIDTH,
        "intermediate_size": 2 * GEMMA_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    }


def _sdxl_transformer(config: _Arguments) -> _Arguments:
    return {
        "num_attention_heads": config["in_channels"] // 16,
        "attention_head_dim": 16,
        "num_transformer_layers": UNET_DEPTHS[config["num_transformer_layers"]],
        "cross_attention_dim": CLIP_L_WIDTH + CLIP_G_WIDTH,
    }


def _shrink_clip_config(module: Any) -> None:
    module.CLIPTextConfig = _with_overrides(module.CLIPTextConfig, _clip_text)


def _shrink_model_util(module: Any) -> None:
    _shrink_clip_config(module)
    module.UNET_PARAMS_MODEL_CHANNELS = UNET_WIDTH
    module.UNET_PARAMS_CHANNEL_MULT = [1, 2, 2, 2]
    module.UNET_PARAMS_CONTEXT_DIM = CLIP_L_WIDTH
    module.UNET_PARAMS_NUM_HEADS = 2
    module.VAE_PARAMS_CH = 16
    module.VAE_PARAMS_CH_MULT = [1, 1, 1, 1]
    module.VAE_PARAMS_NUM_RES_BLOCKS = 1
    vae_config = module.create_vae_diffusers_config
    module.create_vae_diffusers_config = lambda: {**vae_config(), "norm_num_groups": 8}


_SD_WIDTHS = (UNET_WIDTH, 2 * UNET_WIDTH, 2 * UNET_WIDTH, 2 * UNET_WIDTH)
_SD_NORM_GROUPS = 8


def _shrink_sd_unet(module: Any) -> None:
    module.BLOCK_OUT_CHANNELS = _SD_WIDTHS
    module.TIMESTEP_INPUT_DIM = UNET_WIDTH
    module.TIME_EMBED_DIM = 4 * UNET_WIDTH
    module.NORM_GROUPS = _SD_NORM_GROUPS
    module.TRANSFORMER_NORM_NUM_GROUPS = _SD_NORM_GROUPS


def _shrink_sd_control_net(module: Any) -> None:
    from_unet = module.ControlNetModel.from_unet.__func__

    def from_small_unet(cls: Any, unet: Any, *args: Any, **kwargs: Any) -> Any:
        # train_control_net.py gives the U-Net the configuration of the real one.
        unet.config.block_out_channels = _SD_WIDTHS
        unet.config.norm_num_groups = _SD_NORM_GROUPS
        unet.config.cross_attention_dim = CLIP_L_WIDTH
        return from_unet(cls, unet, *args, **kwargs)

    module.ControlNetModel.from_unet = classmethod(from_small_unet)


def _shrink_sdxl_unet(module: Any) -> None:
    module.MODEL_CHANNELS = UNET_WIDTH
    module.TIME_EMBED_DIM = 4 * UNET_WIDTH
    module.CONTEXT_DIM = CLIP_L_WIDTH + CLIP_G_WIDTH
    # The pooled output of text encoder 2 and six size embeddings of width 256.
    module.ADM_IN_CHANNELS = CLIP_G_WIDTH + 6 * 256
    transformer = module.Transformer2DModel
    transformer.__init__ = _with_overrides(transformer.__init__, _sdxl_transformer)
    norm = module.GroupNorm32
    norm_init = norm.__init__

    def small_norm_init(self: Any, num_groups: int, num_channels: int, *args: Any, **kwargs: Any) -> None:
        norm_init(self, min(num_groups, num_channels // 2), num_channels, *args, **kwargs)

    norm.__init__ = small_norm_init


def _shrink_sdxl_control_net(module: Any) -> None:
    control_net = module.SdxlControlNet
    init = control_net.__init__

    def zero_convolution(real: Any) -> Any:
        width = real.out_channels * UNET_WIDTH // _REAL_UNET_WIDTH
        small = module.nn.Conv2d(width, width, kernel_size=1)
        module.nn.init.zeros_(small.weight)
        module.nn.init.zeros_(small.bias)
        return small

    def small_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.controlnet_down_blocks = module.nn.ModuleList(map(zero_convolution, self.controlnet_down_blocks))
        self.controlnet_mid_block = zero_convolution(self.controlnet_mid_block)
        embedding = self.controlnet_cond_embedding
        embedding.conv_out = module.nn.Conv2d(embedding.conv_out.in_channels, UNET_WIDTH, kernel_size=3, padding=1)
        module.nn.init.zeros_(embedding.conv_out.weight)
        module.nn.init.zeros_(embedding.conv_out.bias)

    control_net.__init__ = small_init


FLUX_TRANSFORMER: _Arguments = {
    "context_in_dim": T5_WIDTH,
    "hidden_size": 64,
    "num_heads": 2,
    "depth": 3,
    "depth_single_blocks": 4,
    "axes_dim": [8, 12, 12],
}
"""Arguments of FLUX's transformer. `--blocks_to_swap 1` requires at least three double and four single blocks. The compile
benchmark uses more."""


def _shrink_flux_models(module: Any) -> None:
    for name, spec in module.configs.items():
        module.configs[name] = dataclasses.replace(
            spec,
            params=dataclasses.replace(spec.params, **FLUX_TRANSFORMER, vec_in_dim=CLIP_L_WIDTH),
            # 32 is the minimum, because the autoencoder has group norms with 32 groups.
            ae_params=dataclasses.replace(spec.ae_params, ch=32, ch_mult=[1, 1, 1, 1], num_res_blocks=1),
        )


def _shrink_flux_utils(module: Any) -> None:
    module.CLIPConfig = _with_overrides(module.CLIPConfig, _clip_text)
    module.T5Config = _with_overrides(module.T5Config, _t5)


def _shrink_chroma_models(module: Any) -> None:
    module.chroma_params = dataclasses.replace(
        module.chroma_params, **FLUX_TRANSFORMER, approximator_hidden_size=64, approximator_depth=2
    )


def _shrink_lumina_models(module: Any) -> None:
    real = module.LuminaParams.get_2b_config

    def get_2b_config() -> Any:
        return dataclasses.replace(
            real(), dim=48, n_layers=3, n_heads=2, n_kv_heads=1, axes_dims=[8, 8, 8], cap_feat_dim=GEMMA_WIDTH
        )

    module.LuminaParams.get_2b_config = staticmethod(get_2b_config)


def _shrink_lumina_util(module: Any) -> None:
    module.Gemma2Config = _with_overrides(module.Gemma2Config, _gemma)


def _shrink_sd3_models(module: Any) -> None:
    small = {"ch": 32, "ch_mult": (1, 1, 1, 1), "num_res_blocks": 1}
    for half in (module.VAEEncoder, module.VAEDecoder):
        half.__init__ = _with_overrides(half.__init__, lambda config: small)


def _shrink_sd3_strategy(module: Any) -> None:
    strategy = module.Sd3TextEncodingStrategy
    concat = strategy.concat_encodings

    def concat_encodings(self: Any, lg_out: Any, t5_out: Any, lg_pooled: Any) -> Any:
        # sd-scripts pads CLIP outputs to the width of the real T5, so pad the outputs of the tiny T5 too.
        if t5_out is not None:
            t5_out = module.torch.nn.functional.pad(t5_out, (0, REAL_T5_WIDTH - t5_out.shape[-1]))
        return concat(self, lg_out, t5_out, lg_pooled)

    strategy.concat_encodings = concat_encodings


def _shrink_anima_models(module: Any) -> None:
    small: dict[str, _Arguments] = {
        # `--blocks_to_swap 1` requires at least three blocks.
        "Anima": {"model_channels": 64, "num_blocks": 3, "num_heads": 2, "adaln_lora_dim": 8},
        "LLMAdapter": {"source_dim": QWEN_WIDTH, "target_dim": 32, "model_dim": 32, "num_layers": 2, "num_heads": 2},
    }
    small["Anima"]["crossattn_emb_channels"] = small["LLMAdapter"]["target_dim"]
    for name in small:
        kind = getattr(module, name)
        kind.__init__ = _with_overrides(kind.__init__, functools.partial(lambda sizes, config: sizes, small[name]))


def _shrink_anima_utils(module: Any) -> None:
    """Shrink the text encoder but not its vocabulary, because sd-scripts includes the real tokenizers."""
    config = importlib.import_module("transformers").Qwen3Config
    small = {
        "hidden_size": QWEN_WIDTH,
        "intermediate_size": 2 * QWEN_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_window_layers": 2,
        "layer_types": ["full_attention"] * 2,
    }
    config.from_pretrained = _with_overrides(config.from_pretrained, lambda config: small)


def _shrink_qwen_vae(module: Any) -> None:
    kind = module.AutoencoderKLQwenImage
    kind.__init__ = _with_overrides(kind.__init__, lambda config: {"base_dim": 8, "num_res_blocks": 1})


#: Three double and four single blocks, as in FLUX. The 16 channels of a head are split between the positions of two axes.
_HUNYUAN_WIDTH, _HUNYUAN_HEADS, _HUNYUAN_DEPTHS, _HUNYUAN_ROPE = 32, 2, (3, 4), [8, 8]


def _shrink_hunyuan_image_models(module: Any) -> None:
    """Override the sizes of the submodules, because they are constants in the model's ``__init__``."""
    width, heads = {"hidden_size": _HUNYUAN_WIDTH}, {"heads_num": _HUNYUAN_HEADS}
    sizes: dict[str, _Arguments] = {
        "ByT5Mapper": dict.fromkeys(("out_dim", "hidden_dim", "out_dim1"), _HUNYUAN_WIDTH),
        "PatchEmbed2D": {"embed_dim": _HUNYUAN_WIDTH},
        "SingleTokenRefiner": {"in_channels": QWEN_VL_WIDTH, **width, **heads},
        "TimestepEmbedder": width,
        "MMDoubleStreamBlock": {**width, **heads},
        "MMSingleStreamBlock": {**width, **heads},
        "FinalLayer": width,
    }

    def small(build: Callable[..., Any], overrides: _Arguments) -> Callable[..., Any]:
        signature = inspect.signature(build)

        @functools.wraps(build)
        def built(*args: Any, **kwargs: Any) -> Any:
            return build(**{**signature.bind(*args, **kwargs).arguments, **overrides})

        return built

    for name, overrides in sizes.items():
        setattr(module, name, small(getattr(module, name), overrides))
    kind = module.HYImageDiffusionTransformer
    init = kind.__init__

    @functools.wraps(init)
    def small_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.hidden_size, self.heads_num, self.rope_dim_list = _HUNYUAN_WIDTH, _HUNYUAN_HEADS, list(_HUNYUAN_ROPE)
        self.num_double_blocks, self.num_single_blocks = _HUNYUAN_DEPTHS
        self.double_blocks = self.double_blocks[: self.num_double_blocks]
        self.single_blocks = self.single_blocks[: self.num_single_blocks]

    kind.__init__ = small_init


def _qwen_vl(config: _Arguments) -> _Arguments:
    text = {
        "hidden_size": QWEN_VL_WIDTH,
        "intermediate_size": 2 * QWEN_VL_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention"] * 3,
        "max_window_layers": 3,
        "rope_scaling": {**config["rope_scaling"], "mrope_section": [2, 3, 3]},  # half of a head's 16 channels
        "vocab_size": len(vocabulary.QWEN_VL),
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": QWEN_VL_WIDTH}
    return {
        **text,
        "text_config": {**config["text_config"], **text},
        "vision_config": {**config["vision_config"], **vision, "fullatt_block_indexes": [0]},
    }


def _byt5(config: _Arguments) -> _Arguments:
    """Return the overrides without a width: sd-scripts hard-codes it for captions without quoted text."""
    return {"d_ff": 16, "d_kv": 8, "num_heads": 1, "num_layers": 1, "num_decoder_layers": 1}


def _shrink_hunyuan_text_encoders(module: Any) -> None:
    module.Qwen2_5_VLConfig = _with_overrides(module.Qwen2_5_VLConfig, _qwen_vl)
    module.T5Config = _with_overrides(module.T5Config, _byt5)


def _shrink_hunyuan_vae(module: Any) -> None:
    # The narrowest widths that the channel-splitting shortcuts and the 64 latent channels allow.
    small = {"Encoder": (32, 32, 32, 32, 64, 128), "Decoder": (128, 64, 32, 32, 32, 32)}
    for name, widths in small.items():
        kind = getattr(module, name)
        overrides = {"block_out_channels": widths, "num_res_blocks": 1}
        kind.__init__ = _with_overrides(kind.__init__, functools.partial(lambda sizes, config: sizes, overrides))


SHRINKERS: dict[str, Callable[[Any], None]] = {
    "library.model_util": _shrink_model_util,
    "library.original_unet": _shrink_sd_unet,
    "diffusers.models.controlnets.controlnet": _shrink_sd_control_net,
    "library.sdxl_model_util": _shrink_clip_config,
    "library.sdxl_original_unet": _shrink_sdxl_unet,
    "library.sdxl_original_control_net": _shrink_sdxl_control_net,
    "library.flux_models": _shrink_flux_models,
    "library.flux_utils": _shrink_flux_utils,
    "library.chroma_models": _shrink_chroma_models,
    "library.lumina_models": _shrink_lumina_models,
    "library.lumina_util": _shrink_lumina_util,
    "library.anima_models": _shrink_anima_models,
    "library.anima_utils": _shrink_anima_utils,
    "library.qwen_image_autoencoder_kl": _shrink_qwen_vae,
    "library.hunyuan_image_models": _shrink_hunyuan_image_models,
    "library.hunyuan_image_text_encoder": _shrink_hunyuan_text_encoders,
    "library.hunyuan_image_vae": _shrink_hunyuan_vae,
    "library.sd3_models": _shrink_sd3_models,
    "library.sd3_utils": _shrink_clip_config,
    "library.strategy_sd3": _shrink_sd3_strategy,
}
